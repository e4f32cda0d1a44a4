"""Engine: requests in, steps, outputs out. Start reading here.

One step is: the scheduler picks sequences, the runner moves each of them on by a forward pass and a draw, and each
request turns its new token into text. On a GPU the next step is launched before that, where it is the same once more
whatever the tokens are.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from numba_engine.backends.base import Backend
from numba_engine.config import EngineConfig
from numba_engine.engine.counters import Counters
from numba_engine.engine.loading import LoadedModel
from numba_engine.engine.request import Request, logprobs_of_row
from numba_engine.engine.validation import ValidRequest
from numba_engine.errors import FieldViolation, InvalidRequestError, QueueFullError
from numba_engine.execution.kv_cache import allocate_kv_cache
from numba_engine.execution.model_runner import LaunchedStep, ModelRunner
from numba_engine.execution.sampling import SampledTokens
from numba_engine.outputs import EngineStats, FinishReason, RequestOutput
from numba_engine.scheduling.block_manager import BlockManager
from numba_engine.scheduling.scheduler import ScheduledSequence, ScheduledStep, Scheduler
from numba_engine.scheduling.sequence import Sequence


class StepObserver(Protocol):
    """Looks on while an engine steps. No step is launched ahead meanwhile."""

    def ops_for_step(self, step: ScheduledStep) -> Backend:
        """What to run the step with: the engine's backend, or what stands in its place."""

    def step_done(self, step: ScheduledStep, time_s: float) -> None:
        """It took so long, from scheduling to text; the arrays of its batch are still as they were."""


class Engine:
    """A loaded model at work. One thread owns it: a second one inside it at the same time gets a RuntimeError."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self.config = config
        self.backend = model.backend
        self.observer: StepObserver | None = None
        """To be set only when nothing is in flight: after ``synchronize``."""
        self._tokenizer = model.tokenizer
        self._eos_token_ids = frozenset(model.config.eos_token_ids)
        self._max_len = model.cache.max_model_len
        kv_cache = allocate_kv_cache(model.config, config, model.cache.num_blocks, model.backend)
        self._runner = ModelRunner(model.config, model.decoder, kv_cache, config, model.backend, self._max_len)
        self._scheduler = Scheduler(
            BlockManager(model.cache.num_blocks, config.block_size, prefix_caching=config.prefix_caching),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._ahead: LaunchedStep | None = None
        """A step that was launched before the tokens of the one before it were read."""
        self._requests: dict[str, Request] = {}
        self._counters = Counters()
        self._inside = threading.RLock()

    def add_request(self, request_id: str, request: ValidRequest) -> None:
        """Queue a request; its outputs come from ``step`` under its id.

        Raises:
            InvalidRequestError: the id is in use.
            QueueFullError: ``max_num_seqs`` requests run and ``max_waiting`` wait already.
        """
        with self._sole_thread():
            if self.has(request_id):
                raise InvalidRequestError(FieldViolation("request_id", f"{request_id!r} is in use"))
            if not self.has_place:
                raise QueueFullError(len(self._requests), self._max_requests, self._counters.seconds_per_request())
            params = request.params
            sequence = Sequence(
                request_id,
                request.token_ids,
                params,
                seed=secrets.randbits(64) if params.seed is None else params.seed,
                arrival_s=time.monotonic(),
            )
            self._scheduler.add(sequence)
            self._requests[request_id] = Request(
                sequence, self._tokenizer, eos_token_ids=self._eos_token_ids, max_len=self._max_len
            )

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a queued or running request and free its blocks now; its last output, or None if there is no such one."""
        with self._sole_thread():
            request = self._requests.get(request_id)
            return self._finish(request, FinishReason.ABORTED) if request is not None else None

    def step(self) -> list[RequestOutput]:
        """One forward pass: every scheduled sequence moves on. Outputs of the requests that got or ended something."""
        with self._sole_thread():
            started_s = time.monotonic()
            outputs = [self._finish(r, FinishReason.TIME_LIMIT) for r in self._late_requests(started_s)]
            if launched := self._ahead or self._launch(started_s):
                self._ahead = self._schedule_ahead(launched)
                outputs += self._complete(launched)
                self._note_done(launched.step, started_s)
            return outputs

    def synchronize(self) -> list[RequestOutput]:
        """Be done with the step that was launched ahead, if one was; its outputs."""
        with self._sole_thread():
            launched, self._ahead = self._ahead, None
            return self._complete(launched) if launched is not None else []

    def has(self, request_id: str) -> bool:
        """It is queued or running."""
        return request_id in self._requests

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def has_place(self) -> bool:
        """In the next step or in the queue: ``max_waiting`` counts only those that find no place in the step."""
        return len(self._requests) < self._max_requests

    @property
    def stats(self) -> EngineStats:
        scheduler, counters = self._scheduler, self._counters
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            max_num_seqs=self.config.max_num_seqs,
            num_kv_blocks=scheduler.blocks.num_blocks,
            num_free_kv_blocks=scheduler.blocks.num_free_blocks,
            block_size=self.config.block_size,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            completion_tokens=counters.completion_tokens,
            num_steps=counters.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_finished=counters.num_finished,
            num_aborted=counters.num_aborted,
        )

    def capture_graphs(self) -> None:
        """Capture every decode step that can be captured, so that none is while a request waits."""
        self._runner.capture_graphs()

    def reset_counters(self) -> None:
        self._counters = Counters()

    # ---- parts of a step -------------------------------------------------------------------------------------------

    def _late_requests(self, now_s: float) -> list[Request]:
        return [request for request in self._requests.values() if request.past_deadline(now_s)]

    def _launch(self, now_s: float) -> LaunchedStep | None:
        step = self._scheduler.schedule(now_s)
        return self._runner.launch(step, self._ops_for(step)) if step else None

    def _ops_for(self, step: ScheduledStep) -> Backend:
        return self.backend if self.observer is None else self.observer.ops_for_step(step)

    def _schedule_ahead(self, launched: LaunchedStep) -> LaunchedStep | None:
        """The next step, if it is the same once more whatever tokens this one draws; so the device need not wait until
        the host has read them. A request that turns out to have ended has a row in it that counts for nothing."""
        if not launched.is_repeatable or self.observer is not None:
            return None
        requests = [self._request_of(scheduled) for scheduled in launched.step]
        will_continue = all(request is not None and request.will_continue(num_unseen=1) for request in requests)
        return self._runner.launch_again(launched) if will_continue and self._scheduler.repeat(launched.step) else None

    def _complete(self, launched: LaunchedStep) -> list[RequestOutput]:
        sampled = launched.wait()
        self._scheduler.commit(launched.step)
        return self._emit(launched.step, sampled)

    def _emit(self, step: ScheduledStep, sampled: SampledTokens | None) -> list[RequestOutput]:
        """Hand each drawn token to its request; those that end leave the scheduler."""
        if sampled is None:
            return []
        now_s = time.monotonic()
        outputs = []
        for row, scheduled in enumerate(scheduled for scheduled in step if scheduled.needs_sampling):
            request = self._request_of(scheduled)
            if request is None:
                continue
            logprobs = logprobs_of_row(sampled, row, scheduled.sequence.params.logprobs, self._tokenizer)
            token_id = int(sampled.token_ids[row])
            if token_id < 0 or (logprobs is not None and not math.isfinite(logprobs.chosen.logprob)):
                output = request.fail(self._why_not_finite, now_s)
            else:
                output = request.push(token_id, logprobs, now_s)
            if output.finished:
                self._forget(request, output)
            outputs.append(output)
        return outputs

    @property
    def _why_not_finite(self) -> str:
        if self.backend.kv_cache_dtype == np.float16:
            way_out = "keys or values are probably beyond float16: --kv-cache-dtype float32 (kv_cache_dtype) holds them"
        else:
            way_out = "weights or activations hold NaN or are beyond float32"
        return f"the model's logits are no finite numbers, so no token can be chosen; {way_out}"

    def _note_done(self, step: ScheduledStep, started_s: float) -> None:
        if self.observer is not None:
            self.observer.step_done(step, time.monotonic() - started_s)
        self._counters.count_step(time.monotonic() - started_s)

    # ---- requests --------------------------------------------------------------------------------------------------

    def _request_of(self, scheduled: ScheduledSequence) -> Request | None:
        """The request whose sequence it is; None if that has ended since the step was launched."""
        request = self._requests.get(scheduled.sequence.request_id)
        return request if request is not None and request.sequence is scheduled.sequence else None

    def _finish(self, request: Request, reason: FinishReason) -> RequestOutput:
        output = request.end(reason, time.monotonic())
        self._forget(request, output)
        return output

    def _forget(self, request: Request, last_output: RequestOutput) -> None:
        self._scheduler.remove(request.sequence)
        if not self._scheduler.running:
            self._ahead = None  # nobody waits for it
        del self._requests[request.sequence.request_id]
        self._counters.count_finished(last_output)

    @property
    def _max_requests(self) -> int:
        return self.config.max_num_seqs + self.config.max_waiting

    @contextmanager
    def _sole_thread(self) -> Iterator[None]:
        """Two threads in one engine would corrupt it silently."""
        if not self._inside.acquire(blocking=False):
            raise RuntimeError(
                "another thread is inside this LLM; give each thread its own, or one thread all the calls"
            )
        try:
            yield
        finally:
            self._inside.release()
