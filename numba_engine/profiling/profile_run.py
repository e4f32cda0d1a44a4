"""ProfileRun: a profile from its warm-up to its end: what it runs, and what it says after each step."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from numba_engine.backends.instruments import TimeSource
from numba_engine.engine.validation import ValidRequest
from numba_engine.outputs import FinishReason, RequestOutput, Usage
from numba_engine.profiling.report import Peaks, ProfileSummary, StepProfile
from numba_engine.profiling.session import ProfileSession


@dataclass(frozen=True, slots=True)
class ProfileWork:
    """What is profiled, checked."""

    requests: Sequence[ValidRequest]
    """Empty for live traffic."""
    fusion: bool = True
    wants_text: bool = False
    """In the steps, what they added to the one prompt's text."""
    steps_together: int | None = None
    """It ends when all prompts have decoded together for so many steps; None: with the last of them."""
    live_steps: int | None = None
    """Steps of live traffic to report."""
    warm_up_steps: int = 0
    warm_up_requests: Sequence[ValidRequest] = ()
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
    """Of the requests: the first that is not MAX_TOKENS, if any. None at the last step of live traffic."""
    usage: Usage
    """Of the requests together."""


ProfileEvent = ProfileStarted | ProfiledStep | ProfileWaiting | ProfileEnd


class ProfileRun:
    """Runs a profile in an engine that somebody steps: alone (``events``), or beside what else is in it.

    Belongs to the engine's thread. Its requests have ids that no client can give, so that they are never taken for a
    client's.
    """

    def __init__(self, session: ProfileSession, name: str, work: ProfileWork) -> None:
        self._session = session
        self._llm = session.llm
        self._name = name
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

    def events(self) -> Generator[ProfileEvent, None, None]:
        """From start to end, in an engine that nobody else uses. Whoever stops before the end drops it."""
        try:
            yield self.start()
            while self._is_measuring:
                yield from self.after_step(self._llm.step())
        finally:
            self.drop()

    def start(self) -> ProfileStarted:
        """Begins to measure and queues what is run. Raises what the engine refuses it with; then nothing is left."""
        peaks = self._session.peaks  # measured before anything is timed
        self._measure()
        try:
            self._add(self._work.warm_up_requests if self._warm_up_left else self._work.requests)
        except Exception:
            self.drop()
            raise
        return ProfileStarted(peaks, self._session.time_source)

    def owns(self, request_id: str) -> bool:
        return request_id in self._unfinished

    def waiting(self) -> Iterator[ProfileWaiting]:
        """To be said now, where live traffic is to be measured and there is none."""
        if self._work.live_steps is not None and not self._llm.has_unfinished:
            yield ProfileWaiting(self._num_steps)

    def after_step(self, outputs: Sequence[RequestOutput]) -> Iterator[ProfileEvent]:
        """What the engine's last step was, given the outputs of own requests in it; the last event is the end."""
        for output in outputs:
            if output.finished:
                self._unfinished.discard(output.request_id)
                self._finished[output.request_id] = output
            output.raise_error()
        profile = self._session.take_step()
        moved = {output.request_id for output in outputs if output.token_ids}
        self._num_together += len(self._started & moved) == len(self._work.requests)
        self._started |= moved
        if self._warm_up_left:
            self._warm_up(is_step=profile is not None)
        else:
            if profile is not None:
                self._num_steps += 1
                if self._work.with_steps:
                    text = "".join(output.text for output in outputs) if self._work.wants_text else ""
                    yield ProfiledStep(profile, text)
            if self._is_done:
                reason = FinishReason.MAX_TOKENS if self._were_together else None
                self._drop_requests()
                yield self._end(reason)
                return
        yield from self.waiting()

    def abort(self) -> ProfileEnd:
        """Ends it now."""
        self._drop_requests()
        if self._warm_up_left:
            self._measure_anew()
        return self._end(FinishReason.ABORTED)

    def drop(self) -> None:
        """Ends it, if it has not ended: nothing of it stays in the engine."""
        self._drop_requests()
        if self._is_measuring:
            self._stop()

    @property
    def _is_done(self) -> bool:
        if self._work.live_steps:
            return self._num_steps == self._work.live_steps
        return self._requests_are_over

    @property
    def _requests_are_over(self) -> bool:
        if self._work.steps_together is None:
            return not self._unfinished
        return self._were_together or bool(self._finished)  # without one of them they are never together again

    @property
    def _were_together(self) -> bool:
        return self._num_together == self._work.steps_together

    def _warm_up(self, *, is_step: bool) -> None:
        """Counts a step of it; after the last one the measuring begins anew, and what is profiled is queued."""
        self._warm_up_left -= is_step
        if self._warm_up_left and not (self._work.warm_up_requests and self._requests_are_over):
            return
        self._warm_up_left = 0
        self._drop_requests()
        self._measure_anew()
        self._add(self._work.requests)

    def _measure_anew(self) -> None:
        """Nothing of the warm-up is reported."""
        self._finished.clear()
        self._started.clear()
        self._num_together = 0
        self._stop()
        self._measure()

    def _measure(self) -> None:
        work = self._work
        self._session.start(fusion=work.fusion, timeline=work.with_timeline, unprofiled_every=work.unprofiled_every)
        self._is_measuring = True

    def _stop(self) -> ProfileSummary:
        self._is_measuring = False
        return self._session.stop(decode_seqs=max(len(self._work.requests), 1))

    def _add(self, requests: Sequence[ValidRequest]) -> None:
        for index, request in enumerate(requests):
            request_id = f"{self._name} {index}"
            self._llm.add_request(request_id, request)
            self._unfinished.add(request_id)

    def _drop_requests(self) -> None:
        for request_id in sorted(self._unfinished):
            output = self._llm.abort(request_id)
            assert output is not None, "the engine knows every request that has not finished"
            self._finished[request_id] = output
        self._unfinished.clear()

    def _end(self, reason: FinishReason | None = None) -> ProfileEnd:
        usages = [output.usage for output in self._finished.values()]
        reasons = [output.finish_reason for output in self._finished.values()]
        early = [reason for reason in reasons if reason is not FinishReason.MAX_TOKENS]
        return ProfileEnd(
            summary=self._stop(),
            finish_reason=reason or next(iter(early + reasons), None),
            usage=Usage(
                prompt_tokens=sum(usage.prompt_tokens for usage in usages),
                cached_prompt_tokens=sum(usage.cached_prompt_tokens for usage in usages),
                completion_tokens=sum(usage.completion_tokens for usage in usages),
            ),
        )
