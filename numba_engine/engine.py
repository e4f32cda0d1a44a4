"""LLM: the engine's front door. Start reading here.

One step is: the scheduler picks sequences, the runner moves each of them on by a forward pass and a draw, and each
request turns its new token into text. On a GPU the next step is launched before that, where it is the same once more
whatever the tokens are.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

from numba_engine.backends import create_backend
from numba_engine.backends.base import Backend
from numba_engine.backends.instruments import TimeSource
from numba_engine.backends.sampling import Sampled
from numba_engine.checkpoint import Progress, open_checkpoint
from numba_engine.config import EngineConfig
from numba_engine.counters import Counters
from numba_engine.errors import FieldViolation, InvalidRequestError, QueueFullError
from numba_engine.execution.kv_cache import KVCacheSize, allocate_kv_cache, kv_cache_size
from numba_engine.execution.model_runner import LaunchedStep, ModelRunner
from numba_engine.model.config import ModelConfig, default_sampling
from numba_engine.model.decoder import Decoder
from numba_engine.model.rope import build_rope_table
from numba_engine.model.weights import ModelWeights, load_weights
from numba_engine.outputs import Completion, EngineStats, FinishReason, ModelInfo, PositionLogprobs, RequestOutput
from numba_engine.profiling.memory import process_bytes
from numba_engine.profiling.peaks import peaks_of
from numba_engine.profiling.planned_model import PlannedModel
from numba_engine.profiling.planned_transformer import transformer_from_checkpoint
from numba_engine.profiling.recorder import Recorder, summarize
from numba_engine.profiling.report import MemoryUse, Peaks, ProfileSummary, StepProfile
from numba_engine.request import Request, position_logprobs
from numba_engine.sampling_params import SamplingParams
from numba_engine.scheduling import sequence as scheduling
from numba_engine.scheduling.block_manager import BlockManager
from numba_engine.scheduling.scheduler import ScheduledSequence, ScheduledStep, Scheduler
from numba_engine.text.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""

_USUAL_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama.cpp's defaults: drawing from a whole untruncated distribution derails small models."""


class LLM:
    """A loaded model and its engine.

    One thread owns it: ``add_request``, ``abort``, ``step`` and what is built on them; a second one inside them at the
    same time gets a RuntimeError. The text methods, ``validate``, ``model_info`` and ``default_sampling`` are safe from
    any thread. ``stream`` and ``generate`` may be used side by side: each gets the outputs of its own requests.

    Args:
        model: a Hugging Face directory, a ``.gguf`` file, or ``"demo"``.
        config: how to run it; the defaults suit one machine.
        progress: called while weights load.

    Raises:
        CheckpointError, UnsupportedModelError, BackendUnavailableError, OutOfMemoryError: saying what to do.
    """

    def __init__(self, model: str, config: EngineConfig | None = None, *, progress: Progress | None = None) -> None:
        config = config or EngineConfig()
        backend = create_backend(config)
        with open_checkpoint(model, progress) as checkpoint:
            model_config = ModelConfig.from_checkpoint(checkpoint)
            tokenizer = load_tokenizer(checkpoint)
            default_params = SamplingParams(**(default_sampling(checkpoint) or _USUAL_SAMPLING))
            weights = load_weights(checkpoint, model_config, backend, progress)
            planned_model = transformer_from_checkpoint(checkpoint)
        cache = kv_cache_size(model_config, config, backend)
        decoder = Decoder(weights.with_rope(build_rope_table(model_config, cache.max_model_len, backend)))
        kv_cache = allocate_kv_cache(model_config, config, cache.num_blocks, backend)

        self.default_sampling = default_params
        """For what a request leaves open: as the model's makers recommend, else the usual mild truncation."""
        self.model_info = _model_info(checkpoint.name, model_config, weights, backend, tokenizer, cache)
        self.planned_model: PlannedModel = planned_model
        """The same model as the roofline planner takes it."""
        self.weight_bytes_per_token = weights.bytes_per_token
        """What a decode step of one sequence reads, by kind of weight."""
        self._config = config
        self._backend = backend
        self._recorder: Recorder | None = None
        self._profiled_steps: list[StepProfile] = []
        self._most_kv_blocks = 0
        self._last_step_profile: StepProfile | None = None
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(model_config.eos_token_ids)
        self._runner = ModelRunner(model_config, decoder, kv_cache, config, backend, cache.max_model_len)
        self._scheduler = Scheduler(
            BlockManager(cache.num_blocks, config.block_size, prefix_caching=config.prefix_caching),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._ahead: LaunchedStep | None = None
        """A step that was launched before the tokens of the one before it were read."""
        self._requests: dict[str, Request] = {}
        self._inboxes: dict[str, list[RequestOutput]] = {}
        """Where the outputs of requests of ``stream`` and ``generate`` go."""
        self._unclaimed: list[RequestOutput] = []
        """Outputs of all other requests, until the next ``step`` hands them out."""
        self._inside = threading.RLock()
        self._counters = Counters()

    # ---- text: safe from any thread --------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as transformers gives them: special tokens in it are recognised."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the tokens. Rows of the vocabulary that the tokenizer has no token for stand for no text.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
        """
        if wrong := self._not_in_vocabulary("token_ids", token_ids):
            raise InvalidRequestError(wrong)
        known = [token_id for token_id in token_ids if token_id < self._tokenizer.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation (``role`` and ``content`` each) up to where the assistant answers."""
        return self._tokenizer.apply_chat_template(messages)

    def validate(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's token ids, after every check ``add_request`` makes.

        Raises:
            InvalidRequestError: naming each field that is wrong.
        """
        token_ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        max_len = self.model_info.max_model_len
        bad: list[FieldViolation | None] = []
        if not token_ids:
            bad.append(FieldViolation("prompt", "has no tokens; give at least one"))
        if len(token_ids) >= max_len:
            limit = f"is {len(token_ids)} tokens, but the context holds {max_len}, of which one is left for the output"
            bad.append(FieldViolation("prompt", limit))
        bad.append(self._not_in_vocabulary("prompt", token_ids))
        bad.append(self._not_in_vocabulary("sampling.stop_token_ids", params.stop_token_ids))
        bad.append(self._not_in_vocabulary("sampling.logit_bias", params.logit_bias))
        if violations := [violation for violation in bad if violation]:
            raise InvalidRequestError(*violations)
        return token_ids

    # ---- requests --------------------------------------------------------------------------------------------------

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Queue a request; its outputs come from ``step`` under its id.

        Raises:
            InvalidRequestError: naming each field that is wrong, or that the id is in use.
            QueueFullError: if ``max_num_seqs`` requests run and ``max_waiting`` wait already.
        """
        params = params or self.default_sampling
        token_ids = self.validate(prompt, params)
        with self._sole_thread():
            if request_id in self._requests:
                raise InvalidRequestError(FieldViolation("request_id", f"{request_id!r} is in use"))
            if not self._has_place:
                raise QueueFullError(len(self._requests), self._max_requests, self._counters.seconds_per_request())
            sequence = scheduling.Sequence(
                request_id,
                token_ids,
                params,
                seed=secrets.randbits(64) if params.seed is None else params.seed,
                arrival_s=time.monotonic(),
            )
            self._scheduler.add(sequence)
            self._requests[request_id] = Request(
                sequence, self._tokenizer, eos_token_ids=self._eos_token_ids, max_len=self.model_info.max_model_len
            )

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a queued or running request and free its blocks now; its last output, or None if there is no such one.

        ``step`` hands nothing of it out any more, so its id is free for another request. One that has just ended by
        itself ends as it did.
        """
        with self._sole_thread():
            outputs = [output for output in self._unclaimed if output.request_id == request_id]
            self._unclaimed = [output for output in self._unclaimed if output.request_id != request_id]
            if request := self._requests.get(request_id):
                outputs.append(self._finish(request, FinishReason.ABORTED))
            return RequestOutput.merged(outputs) if outputs else None

    def step(self) -> list[RequestOutput]:
        """One forward pass: every scheduled sequence moves on. Outputs of the requests that got or ended something."""
        self._route(self._step())
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

    @property
    def has_unfinished(self) -> bool:
        """``step`` has something to do or to hand out."""
        return bool(self._requests or self._unclaimed)

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of one step, prompts' and others' together."""
        return self._config.max_num_batched_tokens

    @property
    def stats(self) -> EngineStats:
        scheduler, counters = self._scheduler, self._counters
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            max_num_seqs=self._config.max_num_seqs,
            num_kv_blocks=scheduler.blocks.num_blocks,
            num_free_kv_blocks=scheduler.blocks.num_free_blocks,
            block_size=self._config.block_size,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            completion_tokens=counters.completion_tokens,
            num_steps=counters.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_finished=counters.num_finished,
            num_aborted=counters.num_aborted,
        )

    def warm_up(self) -> None:
        """Compile every kernel a request can need, which takes a while once per machine, so that none has to wait.

        Leaves no trace in ``stats``.
        """
        longest = self.model_info.max_model_len - 1
        prompts = [[0] * min(length, longest) for length in (20, 3)]
        greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        sampled = SamplingParams(top_k=5, top_p=0.9, min_p=0.1, logprobs=1, max_tokens=2, ignore_eos=True)
        self.generate(prompts, [greedy, sampled])
        self._runner.warm_up()
        self.start_profile(fusion=False)  # the textbook ops have kernels of their own
        self.generate(prompts, [greedy, sampled])
        self._stop_recording()
        self._counters = Counters()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run the prompts (or the one) to their ends, batched together; completions in the prompts' order."""
        each_prompt = _as_prompts(prompts)
        each_params = (
            [params or self.default_sampling] * len(each_prompt) if not isinstance(params, Sequence) else params
        )
        if len(each_params) != len(each_prompt):
            raise InvalidRequestError(
                FieldViolation("params", f"{len(each_params)} given for {len(each_prompt)} prompts")
            )
        token_ids = [self.validate(prompt, own) for prompt, own in zip(each_prompt, each_params, strict=True)]
        ids = [f"generate-{next(_ids)}" for _ in each_prompt]
        to_add = deque(zip(ids, token_ids, each_params, strict=True))
        outputs: dict[str, list[RequestOutput]] = {request_id: [] for request_id in ids}
        self._inboxes |= outputs
        try:
            while to_add or any(request_id in self._requests for request_id in ids):
                while to_add and self._has_place:
                    self.add_request(*to_add.popleft())
                self._route(self._step())
        finally:
            for request_id in ids:
                self.abort(request_id)
                del self._inboxes[request_id]
        return [_completion(own, outputs[request_id]) for own, request_id in zip(token_ids, ids, strict=True)]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Run one prompt, yielding each step's output. Closing the iterator aborts the request."""
        request_id = f"stream-{next(_ids)}"
        self.add_request(request_id, prompt, params)
        inbox = self._inboxes[request_id] = []
        try:
            while inbox or request_id in self._requests:
                if inbox:
                    yield inbox.pop(0)
                else:
                    self._route(self._step())
        finally:
            self.abort(request_id)
            del self._inboxes[request_id]

    # ---- profile ---------------------------------------------------------------------------------------------------

    def start_profile(
        self,
        *,
        fusion: bool = True,
        timeline: bool = False,
        unprofiled_every: int = 0,
        recorder: type[Recorder] = Recorder,
    ) -> None:
        """Measure every step from now on until ``stop_profile``. Looking changes no token.

        ``fusion=False`` runs the textbook ops one by one, so that each of them shows. ``timeline`` keeps every call in
        its ``StepProfile``. ``unprofiled_every=n`` runs every n-th decode step as without a profile, so that the
        summary can tell what looking costs. A ``recorder`` that looks closer says more in each ``StepProfile``.
        """
        assert self._recorder is None, "one profile at a time"
        with self._sole_thread():
            self._route(self._complete_ahead())
        self._recorder = recorder(
            self._backend,
            fusion=fusion and self._config.fusion,
            timeline=timeline,
            unprofiled_every=unprofiled_every,
            peaks=self.peaks if self._backend.counter is not None else None,
        )
        self._profiled_steps = []
        self._most_kv_blocks = 0

    @property
    def time_source(self) -> TimeSource:
        """How the profile that is on takes the times of ops."""
        assert self._recorder is not None, "start_profile first"
        return self._recorder.time_source

    def take_step_profile(self) -> StepProfile | None:
        """What the last ``step`` did; None if it did nothing or no profile is on."""
        profile, self._last_step_profile = self._last_step_profile, None
        return profile

    def stop_profile(self, *, decode_seqs: int = 1) -> ProfileSummary:
        """End the profile and sum it up. The first one measures the machine's peaks, which takes a moment.

        Decode steps of fewer than ``decode_seqs`` sequences are left out of its decode figures: for sequences that are
        to decode together, and of which the first decode already while the others' prompts are computed.
        """
        assert self._recorder is not None, "start_profile first"
        self._stop_recording()
        return summarize(self._profiled_steps, peaks=self.peaks, memory=self._memory_use(), decode_seqs=decode_seqs)

    @cached_property
    def peaks(self) -> Peaks:
        """What the device can do at most, measured once, while nothing else of the engine runs."""
        return peaks_of(self._backend, self.model_info.weight_formats)

    # ---- parts of the above ----------------------------------------------------------------------------------------

    def _step(self) -> list[RequestOutput]:
        with self._sole_thread():
            started_s = time.monotonic()
            outputs = [self._finish(r, FinishReason.TIME_LIMIT) for r in self._late_requests(started_s)]
            launched = self._ahead or self._launch(started_s)
            if launched is None:
                return outputs
            self._ahead = self._launch_ahead_of(launched)
            outputs += self._complete(launched)
            self._record(launched.step, started_s)
            self._counters.count_step(time.monotonic() - started_s)
            return outputs

    def _launch(self, now_s: float) -> LaunchedStep | None:
        step = self._scheduler.schedule(now_s)
        return self._runner.launch(step, self._ops_for(step)) if step else None

    def _launch_ahead_of(self, launched: LaunchedStep) -> LaunchedStep | None:
        """The next step, if it is the same once more whatever tokens this one draws; so the device need not wait until
        the host has read them. A request that turns out to have ended has a row in it that counts for nothing."""
        if not launched.is_repeatable or self._recorder is not None:
            return None
        requests = [self._request_of(scheduled) for scheduled in launched.step]
        go_on = all(request is not None and request.goes_on(num_unseen=1) for request in requests)
        return self._runner.launch_again(launched) if go_on and self._scheduler.repeat(launched.step) else None

    def _complete(self, launched: LaunchedStep) -> list[RequestOutput]:
        sampled = launched.wait()
        self._scheduler.commit(launched.step)
        return self._emit(launched.step, sampled)

    def _complete_ahead(self) -> list[RequestOutput]:
        """Be done with the step that was launched ahead, if one was."""
        launched, self._ahead = self._ahead, None
        return self._complete(launched) if launched is not None else []

    def _request_of(self, scheduled: ScheduledSequence) -> Request | None:
        """The request whose sequence it is; None if that has ended since the step was launched."""
        request = self._requests.get(scheduled.sequence.request_id)
        return request if request is not None and request.sequence is scheduled.sequence else None

    def _ops_for(self, step: ScheduledStep) -> Backend:
        if self._recorder is None:
            return self._backend
        return self._recorder.ops_for_step(is_decode=all(scheduled.is_decode for scheduled in step))

    def _stop_recording(self) -> None:
        assert self._recorder is not None
        self._recorder.close()
        self._recorder = None

    def _memory_use(self) -> MemoryUse:
        block_bytes = self._config.block_size * self.model_info.kv_bytes_per_token
        return MemoryUse(
            weight_bytes=self.model_info.weight_bytes,
            kv_cache_bytes=self._scheduler.blocks.num_blocks * block_bytes,
            kv_used_bytes=self._most_kv_blocks * block_bytes,
            free_bytes=self._backend.free_memory_bytes(),
            process_bytes=process_bytes(),
        )

    def _route(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self._inboxes.get(output.request_id, self._unclaimed).append(output)

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

    def _not_in_vocabulary(self, field: str, token_ids: Iterable[int]) -> FieldViolation | None:
        vocab_size = self.model_info.vocab_size
        wrong = next((i for i in token_ids if type(i) is not int or not 0 <= i < vocab_size), None)
        if wrong is None:
            return None
        return FieldViolation(field, f"token id {wrong!r} is not in the vocabulary (0 to {vocab_size - 1})")

    @property
    def _has_place(self) -> bool:
        """In the next step or in the queue: ``max_waiting`` counts only those that find no place in the step."""
        return len(self._requests) < self._max_requests

    @property
    def _max_requests(self) -> int:
        return self._config.max_num_seqs + self._config.max_waiting

    def _late_requests(self, now_s: float) -> list[Request]:
        return [request for request in self._requests.values() if request.is_late(now_s)]

    def _emit(self, step: ScheduledStep, sampled: Sampled | None) -> list[RequestOutput]:
        """Hand each drawn token to its request; those that end leave the scheduler."""
        if sampled is None:
            return []
        now_s = time.monotonic()
        outputs = []
        for row, scheduled in enumerate(scheduled for scheduled in step if scheduled.wants_token):
            request = self._request_of(scheduled)
            if request is None:
                continue
            logprobs = self._logprobs_of_row(sampled, row, scheduled.sequence.params.logprobs)
            output = request.push(int(sampled.token_ids[row]), logprobs, now_s)
            if output.finished:
                self._forget(request, output)
            outputs.append(output)
        return outputs

    def _logprobs_of_row(self, sampled: Sampled, row: int, num_top: int | None) -> PositionLogprobs | None:
        if num_top is None:
            return None
        assert sampled.logprobs is not None
        assert sampled.top_token_ids is not None
        assert sampled.top_logprobs is not None
        chosen = int(sampled.token_ids[row]), float(sampled.logprobs[row])
        top = zip(
            sampled.top_token_ids[row, :num_top].tolist(), sampled.top_logprobs[row, :num_top].tolist(), strict=True
        )
        return position_logprobs(self._tokenizer, chosen, list(top))

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

    def _record(self, step: ScheduledStep, started_s: float) -> None:
        """Close the step's profile, if one is on."""
        if self._recorder is None:
            return
        num_decode = sum(scheduled.is_decode for scheduled in step)
        blocks = self._scheduler.blocks
        self._most_kv_blocks = max(self._most_kv_blocks, blocks.num_blocks - blocks.num_free_blocks)
        self._last_step_profile = self._recorder.take_step(
            index=len(self._profiled_steps),
            num_prefill_tokens=sum(scheduled.num_new_tokens for scheduled in step) - num_decode,
            num_decode_tokens=num_decode,
            num_seqs=len(step),
            time_s=time.monotonic() - started_s,
        )
        self._profiled_steps.append(replace(self._last_step_profile, timeline=()))  # nothing is summed up from it


_ids = itertools.count()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A lone text, or a lone list of token ids, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    return [prompts] if prompts and all(isinstance(entry, int) for entry in prompts) else prompts  # type: ignore[return-value,list-item]


def _completion(prompt_token_ids: list[int], outputs: list[RequestOutput]) -> Completion:
    last = outputs[-1]
    assert last.finish_reason is not None
    assert last.timings is not None
    return Completion(
        prompt_token_ids=tuple(prompt_token_ids),
        token_ids=tuple(i for output in outputs for i in output.token_ids),
        text="".join(output.text for output in outputs),
        finish_reason=last.finish_reason,
        stop_sequence=last.stop_sequence,
        stop_token_id=last.stop_token_id,
        logprobs=tuple(p for output in outputs for p in output.logprobs),
        usage=last.usage,
        timings=last.timings,
    )


def _model_info(
    name: str,
    model: ModelConfig,
    weights: ModelWeights,
    backend: Backend,
    tokenizer: Tokenizer,
    cache: KVCacheSize,
) -> ModelInfo:
    return ModelInfo(
        name=name,
        architecture=model.architecture,
        num_parameters=weights.num_parameters,
        weight_bytes=weights.nbytes,
        weight_formats=weights.format_names,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        max_model_len=cache.max_model_len,
        eos_token_ids=model.eos_token_ids,
        has_chat_template=tokenizer.chat_template is not None,
        backend=backend.name,
        device_name=backend.device_name,
        num_threads=backend.num_threads,
        activation_dtype=backend.quantized_matmul_dtype,
        kv_cache_dtype=backend.kv_cache_dtype.name,
        kv_bytes_per_token=cache.bytes_per_token,
    )
