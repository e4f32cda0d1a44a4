"""ProfileSession: profiles of one engine, one after the other, from above it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from numba_engine.backends.base import Backend
from numba_engine.backends.instruments import TimeSource
from numba_engine.engine.llm import LLM
from numba_engine.engine.validation import ValidRequest
from numba_engine.outputs import RequestOutput
from numba_engine.profiling.memory import process_bytes
from numba_engine.profiling.peaks import peaks_of
from numba_engine.profiling.planned_model import PlannedModel
from numba_engine.profiling.planned_transformer import transformer_from_headers
from numba_engine.profiling.recorder import Recorder, summarize
from numba_engine.profiling.report import MemoryUse, Peaks, ProfileSummary, StepProfile
from numba_engine.scheduling.scheduler import ScheduledStep


@dataclass(frozen=True, slots=True)
class SessionStep:
    """One step that a session had its engine take."""

    outputs: list[RequestOutput]
    profile: StepProfile | None
    """None if it did nothing or no profile is on."""


class ProfileSession:
    """Observes an engine's steps while a profile is on, and sums them up; runs requests in it as well.

    Belongs to the engine's thread. ``llm``, ``planned_model``, ``weight_bytes_per_token`` and, once they were measured,
    ``peaks`` are safe from any.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._recorder: Recorder | None = None
        self._steps: list[StepProfile] = []
        self._max_kv_blocks = 0
        self._last_step: StepProfile | None = None

    @cached_property
    def peaks(self) -> Peaks:
        """What the device can do at most, measured once, while nothing else of the engine runs."""
        return peaks_of(self.llm.engine.backend, self.llm.model_info.weight_formats)

    @cached_property
    def planned_model(self) -> PlannedModel:
        """The engine's model as the roofline planner takes it."""
        model = self.llm.model
        return transformer_from_headers(model.info.name, model.config, model.stored)

    @cached_property
    def weight_bytes_per_token(self) -> dict[str, int]:
        """What a decode step of one sequence reads, by kind of weight."""
        return self.llm.model.decoder.weights.bytes_per_token

    # ---- a profile -------------------------------------------------------------------------------------------------

    def start(
        self,
        *,
        fusion: bool = True,
        timeline: bool = False,
        unprofiled_every: int = 0,
        recorder: type[Recorder] = Recorder,
    ) -> None:
        """Measure every step from now on until ``stop``. Looking changes no token.

        ``fusion=False`` runs the textbook ops one by one, so that each of them shows. ``timeline`` keeps every call in
        its ``StepProfile``. ``unprofiled_every=n`` runs every n-th decode step as without a profile, so that the
        summary can tell what looking costs. A ``recorder`` that looks closer says more in each ``StepProfile``.
        """
        assert self._recorder is None, "one profile at a time"
        self.llm.synchronize()
        engine = self.llm.engine
        self._recorder = recorder(
            engine.backend,
            fusion=fusion and engine.config.fusion,
            timeline=timeline,
            unprofiled_every=unprofiled_every,
            peaks=self.peaks if engine.backend.counter is not None else None,
        )
        self._steps = []
        self._max_kv_blocks = 0
        engine.observer = self

    @property
    def time_source(self) -> TimeSource:
        """How the profile that is on takes the times of ops."""
        assert self._recorder is not None, "start first"
        return self._recorder.time_source

    def take_step(self) -> StepProfile | None:
        """What the engine's last step did; None if it did nothing or no profile is on."""
        profile, self._last_step = self._last_step, None
        return profile

    def stop(self, *, decode_seqs: int = 1) -> ProfileSummary:
        """End the profile and sum it up. The first one measures the machine's peaks, which takes a moment.

        Decode steps of fewer than ``decode_seqs`` sequences are left out of its decode figures: for sequences that are
        to decode together, and of which the first decode already while the others' prompts are computed.
        """
        assert self._recorder is not None, "start first"
        self.llm.engine.observer = None
        self._recorder.close()
        self._recorder = None
        return summarize(self._steps, peaks=self.peaks, memory=self._memory_use(), decode_seqs=decode_seqs)

    @contextmanager
    def running(self, requests: Sequence[ValidRequest]) -> Iterator[Iterator[SessionStep]]:
        """Queue requests and hand out the steps that take them to their ends, one for each ``next``.

        Those that have not ended when the context is left are aborted. No other request may be in the engine.
        """
        unfinished = {f"session-{next(_ids)}": request for request in requests}
        try:
            for request_id, request in unfinished.items():
                self.llm.add_request(request_id, request)
            yield self._steps_of(unfinished)
        finally:
            for request_id in unfinished:
                self.llm.abort(request_id)

    def _steps_of(self, unfinished: dict[str, ValidRequest]) -> Iterator[SessionStep]:
        while unfinished:
            outputs = self.llm.step()
            for output in outputs:
                if output.finished:
                    del unfinished[output.request_id]
                output.raise_error()
            yield SessionStep(outputs, self.take_step())

    # ---- what the engine asks its observer -------------------------------------------------------------------------

    def ops_for_step(self, step: ScheduledStep) -> Backend:
        assert self._recorder is not None
        return self._recorder.ops_for_step(is_decode=all(scheduled.is_decode for scheduled in step))

    def step_done(self, step: ScheduledStep, time_s: float) -> None:
        assert self._recorder is not None
        num_decode = sum(scheduled.is_decode for scheduled in step)
        stats = self.llm.stats
        self._max_kv_blocks = max(self._max_kv_blocks, stats.num_kv_blocks - stats.num_free_kv_blocks)
        self._last_step = self._recorder.take_step(
            index=len(self._steps),
            num_prefill_tokens=sum(scheduled.num_new_tokens for scheduled in step) - num_decode,
            num_decode_tokens=num_decode,
            num_seqs=len(step),
            time_s=time_s,
        )
        self._steps.append(replace(self._last_step, timeline=()))  # nothing is summed up from it

    def _memory_use(self) -> MemoryUse:
        info, stats = self.llm.model_info, self.llm.stats
        block_bytes = stats.block_size * info.kv_bytes_per_token
        return MemoryUse(
            weight_bytes=info.weight_bytes,
            kv_cache_bytes=stats.num_kv_blocks * block_bytes,
            kv_used_bytes=self._max_kv_blocks * block_bytes,
            free_bytes=self.llm.engine.backend.free_memory_bytes(),
            process_bytes=process_bytes(),
        )


_ids = itertools.count()
