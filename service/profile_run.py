"""The one profile that may run in the engine: what it runs, and what it says after each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from numba_engine import (
    LLM,
    FinishReason,
    Peaks,
    ProfileSummary,
    RequestOutput,
    StepProfile,
    TimeSource,
    Usage,
    ValidRequest,
)

MAX_CALLS = 16384
"""Told of one step: so many stay far below the 4 MiB of a message that clients take unless told otherwise."""


@dataclass(frozen=True, slots=True)
class ProfileWork:
    """What is profiled, checked."""

    prompts: Sequence[ValidRequest]
    """Empty for live traffic."""
    fusion: bool
    wants_text: bool
    """In the steps, what they added to the one prompt's text."""
    steps_together: int | None = None
    """It ends when all prompts have decoded together for so many steps; None: with the last of them."""
    live_steps: int | None = None
    """Steps of live traffic to report."""
    warm_up_steps: int = 0
    warm_up_prompts: Sequence[ValidRequest] = ()
    """Run in the warm-up; empty for live traffic."""
    with_steps: bool = True
    """Say each step, and not only the summary."""
    with_timeline: bool = False
    unprofiled_every: int = 0


@dataclass(frozen=True, slots=True)
class ProfileStarted:
    """What is measured, and how."""

    peaks: Peaks
    time_source: TimeSource


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """A measured step, and what it added to the text of the profiled prompt."""

    profile: StepProfile
    text: str
    calls_left_out: int = 0
    """Of the timeline, beyond ``MAX_CALLS``."""


@dataclass(frozen=True, slots=True)
class ProfileWaiting:
    """There is no live traffic to measure."""

    num_steps: int
    """Reported until now."""


@dataclass(frozen=True, slots=True)
class ProfileEnd:
    """The profile as a whole."""

    summary: ProfileSummary
    finish_reason: FinishReason | None
    """Of the profiled requests: the first that is not MAX_TOKENS, if any. None at the last step of live traffic."""
    usage: Usage
    """Of the profiled requests together."""


ProfileEvent = ProfileStarted | ProfiledStep | ProfileWaiting | ProfileEnd


class ProfileRun:
    """Runs a profile in an engine. Belongs to the engine's thread.

    Its requests have ids that no client can give, so that they are never taken for a client's.
    """

    def __init__(self, request_id: str, work: ProfileWork) -> None:
        self._name = request_id
        self._work = work
        self._warm_up_left = work.warm_up_steps
        self._unfinished: set[str] = set()
        self._finished: dict[str, RequestOutput] = {}
        self._num_steps = 0
        self._started: set[str] = set()
        """Own requests that have a token."""
        self._num_together = 0
        """Steps in which all of them decoded."""
        self._is_measuring = False

    def start(self, llm: LLM) -> ProfileStarted:
        """Begins to measure and queues what is run. Raises what the engine refuses it with; then nothing is left."""
        self._measure(llm)
        try:
            self._add(llm, self._work.warm_up_prompts if self._warm_up_left else self._work.prompts)
        except Exception:
            self.drop(llm)
            raise
        return ProfileStarted(llm.peaks, llm.time_source)

    def owns(self, request_id: str) -> bool:
        return request_id in self._unfinished

    def waiting(self, llm: LLM) -> Iterator[ProfileWaiting]:
        """To be said now, where live traffic is to be measured and there is none."""
        if self._work.live_steps is not None and not llm.has_unfinished:
            yield ProfileWaiting(self._num_steps)

    def after_step(self, llm: LLM, outputs: Sequence[RequestOutput]) -> Iterator[ProfileEvent]:
        """What the engine's last step was, given the outputs of own requests in it; the last event is the end."""
        for output in outputs:
            if output.finished:
                self._unfinished.discard(output.request_id)
                self._finished[output.request_id] = output
        profile = llm.take_step_profile()
        moved = {output.request_id for output in outputs if output.token_ids}
        self._num_together += len(self._started & moved) == len(self._work.prompts)
        self._started |= moved
        if self._warm_up_left:
            self._warm_up(llm, is_step=profile is not None)
        else:
            if profile is not None:
                self._num_steps += 1
                if self._work.with_steps:
                    yield self._told(profile, outputs)
            if self._is_done:
                reason = FinishReason.MAX_TOKENS if self._were_together else None
                self._drop_requests(llm)
                yield self._end(llm, reason)
                return
        yield from self.waiting(llm)

    def abort(self, llm: LLM) -> ProfileEnd:
        """Ends it now."""
        self._drop_requests(llm)
        if self._warm_up_left:
            self._measure_anew(llm)
        return self._end(llm, FinishReason.ABORTED)

    def drop(self, llm: LLM) -> None:
        """Ends it after a failure: nothing of it stays in the engine."""
        self._drop_requests(llm)
        if self._is_measuring:
            self._stop(llm)

    def _told(self, profile: StepProfile, outputs: Sequence[RequestOutput]) -> ProfiledStep:
        calls_left_out = max(len(profile.timeline) - MAX_CALLS, 0)
        if calls_left_out:
            profile = replace(profile, timeline=profile.timeline[:MAX_CALLS])
        text = "".join(output.text for output in outputs) if self._work.wants_text else ""
        return ProfiledStep(profile, text, calls_left_out)

    @property
    def _is_done(self) -> bool:
        if self._work.live_steps:
            return self._num_steps == self._work.live_steps
        return self._prompts_are_over

    @property
    def _prompts_are_over(self) -> bool:
        if self._work.steps_together is None:
            return not self._unfinished
        return self._were_together or bool(self._finished)  # without one of them they are never together again

    @property
    def _were_together(self) -> bool:
        return self._num_together == self._work.steps_together

    @property
    def _decode_seqs(self) -> int:
        return max(len(self._work.prompts), 1)

    def _warm_up(self, llm: LLM, *, is_step: bool) -> None:
        """Counts a step of it; after the last one the measuring begins anew, and what is profiled is queued."""
        self._warm_up_left -= is_step
        if self._warm_up_left and not (self._work.warm_up_prompts and self._prompts_are_over):
            return
        self._warm_up_left = 0
        self._drop_requests(llm)
        self._measure_anew(llm)
        self._add(llm, self._work.prompts)

    def _measure_anew(self, llm: LLM) -> None:
        """Nothing of the warm-up is reported."""
        self._finished.clear()
        self._started.clear()
        self._num_together = 0
        self._stop(llm)
        self._measure(llm)

    def _measure(self, llm: LLM) -> None:
        work = self._work
        llm.start_profile(fusion=work.fusion, timeline=work.with_timeline, unprofiled_every=work.unprofiled_every)
        self._is_measuring = True

    def _stop(self, llm: LLM) -> ProfileSummary:
        self._is_measuring = False
        return llm.stop_profile(decode_seqs=self._decode_seqs)

    def _add(self, llm: LLM, prompts: Sequence[ValidRequest]) -> None:
        for index, prompt in enumerate(prompts):
            request_id = f"{self._name} {index}"
            llm.add_request(request_id, prompt)
            self._unfinished.add(request_id)

    def _drop_requests(self, llm: LLM) -> None:
        for request_id in sorted(self._unfinished):
            output = llm.abort(request_id)
            assert output is not None, "the engine knows every request that has not finished"
            self._finished[request_id] = output
        self._unfinished.clear()

    def _end(self, llm: LLM, reason: FinishReason | None = None) -> ProfileEnd:
        usages = [output.usage for output in self._finished.values()]
        reasons = [output.finish_reason for output in self._finished.values()]
        early = [reason for reason in reasons if reason is not FinishReason.MAX_TOKENS]
        return ProfileEnd(
            summary=self._stop(llm),
            finish_reason=reason or next(iter(early + reasons), None),
            usage=Usage(
                prompt_tokens=sum(usage.prompt_tokens for usage in usages),
                cached_prompt_tokens=sum(usage.cached_prompt_tokens for usage in usages),
                completion_tokens=sum(usage.completion_tokens for usage in usages),
            ),
        )
