"""The engine's thread, and the way of a request through it.

One thread owns the LLM: it takes commands from a queue, steps while there is work and sleeps while there is none. What
it produces goes to the event loop in batches, where each request has a :class:`RequestStream`. Neither side ever waits
for the other: commands are queued, and unread output is merged in the stream until its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from numba_engine import (
    LLM,
    EngineStats,
    NonFiniteLogitsError,
    NumbaEngineError,
    Progress,
    RequestOutput,
    Usage,
    ValidRequest,
)
from numba_engine.profiling import (
    ProfiledStep,
    ProfileEnd,
    ProfileEvent,
    ProfileRun,
    ProfileSession,
    ProfileStarted,
    ProfileWaiting,
    ProfileWork,
)
from service.errors import DuplicateRequestError, EngineFailedError, ProfileBusyError, SlowClientError
from service.telemetry import log

Load = Callable[[Progress], ProfileSession]

MAX_CALLS = 16384
"""Told of one step: so many stay far below the 4 MiB of a message that clients take unless told otherwise."""

_IDLE_HEARTBEAT_S = 1.0
_PROGRESS_LOG_S = 2.0


class EngineState(enum.Enum):
    LOADING = "loading"
    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LoadProgress:
    what: str = ""
    done_bytes: int = 0
    total_bytes: int = 0


class _Accepted:
    """The engine queued the request."""


_ACCEPTED = _Accepted()

_Event = _Accepted | RequestOutput | ProfileEvent | Exception


class RequestStream:
    """What the engine has produced for one request and its client has not read. Lives on the event loop."""

    def __init__(self, request_id: str, max_pending_bytes: int) -> None:
        self.request_id = request_id
        self.ended = False
        """Nothing more comes from the engine: the last output or an error is here."""
        self._max_pending_bytes = max_pending_bytes
        self._pending_bytes = 0
        self._outputs: list[RequestOutput] = []
        self._profile: list[ProfileEvent] = []
        self._accepted = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    async def accepted(self) -> None:
        """Returns when the engine has queued the request. Raises what it refused it with."""
        while not (self._accepted or self.ended):
            await self._change()
        if self._error is not None and not self._accepted:
            raise self._error

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """The request's outputs to the last; those that came while the caller was busy are merged into one.

        Raises:
            SlowClientError, EngineFailedError: after the outputs that came before.
        """
        while True:
            while not (self._outputs or self.ended):
                await self._change()
            outputs, self._outputs, self._pending_bytes = self._outputs, [], 0
            if outputs:
                yield RequestOutput.merged(outputs)
            if self.ended and not self._outputs:
                break
        if self._error is not None:
            raise self._error

    async def profile_events(self) -> AsyncIterator[ProfileEvent]:
        """The profiled steps, then the end. Raises as :meth:`outputs`."""
        while True:
            while not (self._profile or self.ended):
                await self._change()
            events, self._profile, self._pending_bytes = self._profile, [], 0
            for event in events:
                yield event
            if self.ended and not self._profile:
                break
        if self._error is not None:
            raise self._error

    def push(self, event: _Event) -> None:
        """Takes an event in; a request that is over ignores it."""
        if self.ended:
            return
        match event:
            case _Accepted():
                self._accepted = True
            case RequestOutput():
                self._outputs.append(event)
                self._pending_bytes += _wire_bytes(event)
                self.ended = event.finished
                if event.error is not None:
                    self._error = NonFiniteLogitsError(event.error)
            case ProfileStarted() | ProfiledStep() | ProfileWaiting() | ProfileEnd():
                self._profile.append(event)
                self._pending_bytes += _wire_bytes_of_profile(event)
                self.ended = isinstance(event, ProfileEnd)
            case _:
                self._error = event
                self.ended = True
        if self._pending_bytes > self._max_pending_bytes and not self.ended:
            self._error = SlowClientError.behind(self._pending_bytes, self._max_pending_bytes)
            self.ended = True
        self._changed.set()

    @property
    def is_too_slow(self) -> bool:
        return isinstance(self._error, SlowClientError)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class EngineLoop:
    """Runs an LLM in a thread of its own. All methods belong to the event loop; ``_engine_*`` to the thread."""

    def __init__(self, load: Load, *, max_pending_bytes: int, on_change: Callable[[], None]) -> None:
        """
        Args:
            load: Makes the LLM, with the session for its profiles; called on the engine's thread.
            max_pending_bytes: Unread output at which a request is ended.
            on_change: Called on the event loop when ``state`` has changed.
        """
        self.state = EngineState.LOADING
        self.error: BaseException | None = None
        """Why the state is FAILED."""
        self.load_progress = LoadProgress()
        self.stats: EngineStats | None = None
        """As of the last step or command."""
        self.profiled_request_id: str | None = None
        self.profile_has_own_work = False
        """It does not only watch."""
        self._heartbeat = self._progress_logged = time.monotonic()

        self._loop = asyncio.get_running_loop()
        self._load = load
        self._max_pending_bytes = max_pending_bytes
        self._on_change = on_change
        self._streams: dict[str, RequestStream] = {}
        self._answers: set[asyncio.Future[Usage | None]] = set()
        self._session: ProfileSession | None = None

        self._commands: queue.SimpleQueue[Callable[[LLM], object]] = queue.SimpleQueue()
        self._outbox: list[tuple[RequestStream, _Event]] = []
        self._outbox_lock = threading.Lock()
        self._stopping = False
        # Of the thread: streams of requests in the engine, and the profile with its own.
        self._engine_streams: dict[str, RequestStream] = {}
        self._engine_profile: tuple[ProfileRun, RequestStream] | None = None
        # A daemon, because nothing can interrupt it while it loads or computes, and the process must be able to end.
        self._thread = threading.Thread(target=self._engine_main, name="engine", daemon=True)

    @property
    def is_loaded(self) -> bool:
        return self._session is not None

    @property
    def llm(self) -> LLM:
        """For its facts and its text functions, which any thread may use."""
        return self.session.llm

    @property
    def session(self) -> ProfileSession:
        """For its facts, which any thread may use."""
        assert self._session is not None, "the engine is loaded before anything is admitted"
        return self._session

    @property
    def has_requests(self) -> bool:
        """Of which the callers have not closed the stream."""
        return bool(self._streams)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def heartbeat_age_s(self) -> float:
        return time.monotonic() - self._heartbeat

    def start(self) -> None:
        self._thread.start()

    def submit(self, request_id: str, request: ValidRequest) -> RequestStream:
        """Hands a request to the engine. The caller closes the stream, whatever happens.

        Raises:
            DuplicateRequestError: a request of this id is in the engine.
        """
        stream = self._open(request_id)
        self._commands.put(lambda llm: self._engine_add(llm, stream, request))
        return stream

    def submit_profile(self, request_id: str, work: ProfileWork) -> RequestStream:
        """The same for a profile. Raises ProfileBusyError as well."""
        if self.profiled_request_id is not None:
            raise ProfileBusyError
        stream = self._open(request_id)
        self.profiled_request_id = request_id
        self.profile_has_own_work = bool(work.requests)
        profile = ProfileRun(self.session, request_id, work)
        self._commands.put(lambda llm: self._engine_start_profile(stream, profile))
        return stream

    def close(self, stream: RequestStream) -> None:
        """Forgets a request; one that has not ended is ended within the running step."""
        del self._streams[stream.request_id]
        if self.profiled_request_id == stream.request_id:
            self.profiled_request_id = None
        if not stream.ended:
            stream.ended = True
            self._put_abort(stream)

    def end(self, stream: RequestStream) -> None:
        """Ends a request that has not ended, with finish reason ABORTED."""
        if not stream.ended:
            self._put_abort(stream)

    async def abort(self, request_id: str) -> Usage | None:
        """Ends a request; its stream gets the last output too. What it had used; None where it is not in the engine.

        Raises:
            EngineFailedError: the engine died before it answered.
        """
        stream = self._streams.get(request_id)
        if stream is None or stream.ended or self.state is not EngineState.RUNNING:
            return None
        answer: asyncio.Future[Usage | None] = self._loop.create_future()

        def command(llm: LLM) -> None:
            usage = self._engine_abort(llm, stream)
            self._call_soon(lambda: None if answer.done() else answer.set_result(usage))

        self._commands.put(command)
        self._answers.add(answer)
        try:
            return await answer
        finally:
            self._answers.discard(answer)

    def abort_watching_profile(self) -> None:
        """Ends a profile of live traffic, which has no work of its own to finish."""
        if self.profiled_request_id is not None and not self.profile_has_own_work:
            self._put_abort(self._streams[self.profiled_request_id])

    def abort_all(self) -> None:
        """Ends every request with finish reason ABORTED."""
        for stream in self._streams.values():
            self.end(stream)

    def stop(self) -> None:
        """Ends the thread after the running step."""
        self._stopping = True
        self._commands.put(lambda llm: None)

    async def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended within the timeout."""
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _open(self, request_id: str) -> RequestStream:
        assert self.state is EngineState.RUNNING, "who submits has just looked"
        if request_id in self._streams:
            raise DuplicateRequestError(request_id)
        stream = self._streams[request_id] = RequestStream(request_id, self._max_pending_bytes)
        return stream

    def _put_abort(self, stream: RequestStream) -> None:
        self._commands.put(lambda llm: self._engine_abort(llm, stream))

    def _deliver(self) -> None:
        with self._outbox_lock:
            events, self._outbox = self._outbox, []
        for stream, event in events:
            over = stream.ended
            stream.push(event)
            if not over and stream.is_too_slow:
                self._put_abort(stream)

    def _loaded(self, session: ProfileSession) -> None:
        self._session = session
        self.state = EngineState.RUNNING
        self._on_change()

    def _stopped(self) -> None:
        self.state = EngineState.STOPPED
        self._on_change()

    def _failed(self, error: BaseException) -> None:
        self.state, self.error = EngineState.FAILED, error
        for stream in self._streams.values():
            stream.push(EngineFailedError("the engine failed"))
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(EngineFailedError("the engine failed"))
        self._on_change()

    # From here on: the engine's thread.

    def _engine_main(self) -> None:
        try:
            session = self._load(self._engine_note_progress)
            llm = session.llm
            self._engine_note_progress("measuring this machine's peaks", 0, 0)
            _ = session.peaks  # now, as nothing else may run meanwhile
            self.stats = llm.stats
            self._call_soon(lambda: self._loaded(session))
            while not self._stopping:
                self._heartbeat = time.monotonic()
                self._engine_take_commands(llm)
                self.stats = llm.stats
                if llm.has_unfinished:
                    self._engine_step(llm)
        except BaseException as error:
            # Nothing may die silently here, whatever it is: people wait for this thread's answers.
            if not isinstance(error, NumbaEngineError):
                log(logging.CRITICAL, "the engine failed", error=error)
            failure = error
            self._call_soon(lambda: self._failed(failure))
        else:
            self._call_soon(self._stopped)

    def _engine_note_progress(self, what: str, done_bytes: int, total_bytes: int) -> None:
        now = self._heartbeat = time.monotonic()
        self.load_progress = LoadProgress(what, done_bytes, total_bytes)
        if now > self._progress_logged + _PROGRESS_LOG_S:
            self._progress_logged = now
            log(logging.INFO, "loading", what=what, done_mb=done_bytes // 10**6, total_mb=total_bytes // 10**6)

    def _engine_take_commands(self, llm: LLM) -> None:
        """Runs what is queued; with nothing to compute, waits for it."""
        with contextlib.suppress(queue.Empty):
            if not llm.has_unfinished:
                self._commands.get(timeout=_IDLE_HEARTBEAT_S)(llm)
            while True:
                self._commands.get_nowait()(llm)

    def _engine_add(self, llm: LLM, stream: RequestStream, request: ValidRequest) -> None:
        try:
            llm.add_request(stream.request_id, request)
        except Exception as error:
            # Of a refusal the client is told; of a bug as well (as INTERNAL), and the other requests go on.
            self._post((stream, error))
        else:
            self._engine_streams[stream.request_id] = stream
            self._post((stream, _ACCEPTED))

    def _engine_start_profile(self, stream: RequestStream, profile: ProfileRun) -> None:
        try:
            started = profile.start()
        except Exception as error:
            self._post((stream, error))
        else:
            self._engine_profile = profile, stream
            self._post((stream, _ACCEPTED), (stream, started), *((stream, event) for event in profile.waiting()))

    def _engine_step(self, llm: LLM) -> None:
        events: list[tuple[RequestStream, _Event]] = []
        profiled: list[RequestOutput] = []
        for output in llm.step():
            if self._engine_profile is not None and self._engine_profile[0].owns(output.request_id):
                profiled.append(output)
                continue
            stream = self._engine_streams[output.request_id]
            if output.finished:
                del self._engine_streams[output.request_id]
            events.append((stream, output))
        if self._engine_profile is not None:
            profile, stream = self._engine_profile
            events += [(stream, event) for event in self._engine_profile_events(profile, profiled)]
        self.stats = llm.stats  # who has seen an output sees the step that made it counted
        self._post(*events)

    def _engine_profile_events(
        self, profile: ProfileRun, outputs: Sequence[RequestOutput]
    ) -> Iterator[ProfileEvent | Exception]:
        try:
            for event in profile.after_step(outputs):
                if isinstance(event, ProfileEnd):
                    self._engine_profile = None
                yield event
        except Exception as error:
            # A warm-up that is followed by nothing, or a summary that cannot be made, fails the profile and no other.
            self._engine_profile = None
            profile.drop()
            yield error

    def _engine_abort(self, llm: LLM, stream: RequestStream) -> Usage | None:
        if self._engine_profile is not None and self._engine_profile[1] is stream:
            return self._engine_abort_profile(*self._engine_profile)
        if self._engine_streams.get(stream.request_id) is not stream:
            return None
        output = llm.abort(stream.request_id)
        assert output is not None, "whose last output has not come is in the engine"
        del self._engine_streams[stream.request_id]
        self._post((stream, output))
        return output.usage

    def _engine_abort_profile(self, profile: ProfileRun, stream: RequestStream) -> Usage | None:
        self._engine_profile = None
        try:
            end = profile.abort()
        except Exception as error:
            profile.drop()
            self._post((stream, error))
            return None
        self._post((stream, end))
        return end.usage

    def _post(self, *events: tuple[RequestStream, _Event]) -> None:
        """Sends events to the event loop, waking it once however many gather before it comes round to them."""
        with self._outbox_lock:
            idle = not self._outbox
            self._outbox += events
        if idle and events:
            self._call_soon(self._deliver)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        # The loop is closed when the process ends without waiting for this thread.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)


# What an event takes on the wire, about: counted per output, exactness would cost more than it is worth.
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 12
_OP_BYTES = 120
_CALL_BYTES = 56


def _wire_bytes(output: RequestOutput) -> int:
    candidates = [token for position in output.logprobs for token in (position.chosen, *position.top)]
    return (
        len(output.text.encode())
        + _TOKEN_BYTES * len(output.token_ids)
        + sum(_LOGPROB_BYTES + len(token.text.encode()) for token in candidates)
    )


def _wire_bytes_of_profile(event: ProfileEvent) -> int:
    match event:
        case ProfiledStep(step, text):
            num_calls = min(len(step.timeline), MAX_CALLS)
            return _OP_BYTES * (1 + len(step.ops)) + _CALL_BYTES * num_calls + len(text.encode())
        case ProfileEnd(summary):
            return _OP_BYTES * (1 + len(summary.ops) + len(summary.prefill_ops))
        case _:
            return _OP_BYTES
