"""InferenceService: one method an RPC. What a request is refused or ended with goes through ``_answering``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc.aio

from numba_engine import FieldViolation, InvalidRequestError, QueueFullError
from numba_engine.profiling import ProfileEnd
from numba_engine_api.v1 import inference_pb2 as api
from numba_engine_api.v1 import inference_pb2_grpc as api_grpc
from service import translate, translate_estimate, translate_profile
from service.config import ServiceConfig
from service.engine_loop import EngineLoop
from service.errors import EngineFailedError, ProfileOffError, SlowClientError, UnknownRequestError
from service.retry_hints import RetryHints
from service.status import ServerStatus
from service.telemetry import Counters, RequestRecord, log
from service.text_threads import TextThreads

_Result = TypeVar("_Result")
_Context = grpc.aio.ServicerContext[Any, Any]

_MAX_WAITING_TEXTS = 8  # of the longest
# A cancellation this close to the deadline is the deadline's: the client's clock may run ahead of ours by network time.
_DEADLINE_TOLERANCE_S = 0.05
_MAX_LOGGED_CHARS = 1000


class InferenceServicer(api_grpc.InferenceServiceServicer):
    """Serves one engine. Everything here runs on the event loop and never computes."""

    def __init__(self, engine: EngineLoop, status: ServerStatus, config: ServiceConfig) -> None:
        self.counters = Counters()
        self._engine = engine
        self._status = status
        self._config = config
        self._calls_in_flight = 0
        self._last_answered = time.monotonic()
        self._s_per_call = 0.1
        """How often a call ends that was served, as of late."""
        self._hints: defaultdict[str, RetryHints] = defaultdict(RetryHints)
        """By the reason of a refusal."""
        self._call_ended = asyncio.Event()
        # Checking and tokenising a long prompt takes seconds.
        self._text_threads = TextThreads(max_waiting_bytes=_MAX_WAITING_TEXTS * config.max_text_bytes)

    @property
    def calls_in_flight(self) -> int:
        """Of every method."""
        return self._calls_in_flight

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds, which is looked at after each call."""
        while not condition():
            self._call_ended.clear()
            await self._call_ended.wait()

    @property
    def texts_are_running(self) -> bool:
        """In a thread that nothing can interrupt."""
        return self._text_threads.is_busy

    async def Generate(self, request: api.GenerateRequest, context: _Context) -> None:
        async with self._request("Generate", request, context) as record:
            valid = await self._prepared(request, lambda: translate.prepared(self._engine.llm, request))
            stream = self._engine.submit(record.request_id, valid)
            try:
                await stream.accepted()
                await self._write(context, translate.to_started(request, record.request_id, valid.token_ids))
                async for output in stream.outputs():
                    record.note_output(output)
                    for response in translate.to_generate_responses(request, output):
                        await self._write(context, response)
            finally:
                self._engine.close(stream)

    async def Profile(self, request: api.ProfileRequest, context: _Context) -> None:
        async with self._request("Profile", request, context) as record:
            if self._config.profile == "off":
                raise ProfileOffError
            llm, limits = self._engine.llm, self._engine.stats
            assert limits is not None, "they are there when the engine is loaded"
            work = await self._prepared(request, lambda: translate_profile.prepared(llm, limits, request))
            stream = self._engine.submit_profile(record.request_id, work)
            limit = asyncio.get_running_loop().call_later(self._config.max_profile_s, self._engine.end, stream)
            try:
                await stream.accepted()
                async for event in stream.profile_events():
                    if isinstance(event, ProfileEnd):
                        record.note_end(event.usage, event.finish_reason)
                    for response in translate_profile.to_responses(self._engine.session, event):
                        await self._write(context, response)
            finally:
                limit.cancel()
                self._engine.close(stream)

    async def EstimateThroughput(
        self, request: api.EstimateThroughputRequest, context: _Context
    ) -> api.EstimateThroughputResponse:
        async with self._answering(context, _new_id(), request):
            self._status.require_ready()
            return await self._on_text_thread(
                request, lambda: translate_estimate.estimated(self._engine.session, request)
            )

    async def Tokenize(self, request: api.TokenizeRequest, context: _Context) -> api.TokenizeResponse:
        async with self._answering(context, _new_id(), request):
            self._status.require_ready()
            return await self._on_text_thread(request, lambda: translate.tokenized(self._engine.llm, request))

    async def Detokenize(self, request: api.DetokenizeRequest, context: _Context) -> api.DetokenizeResponse:
        async with self._answering(context, _new_id(), request):
            self._status.require_ready()
            return await self._on_text_thread(request, lambda: translate.detokenized(self._engine.llm, request))

    async def GetModelInfo(self, request: api.GetModelInfoRequest, context: _Context) -> api.GetModelInfoResponse:
        async with self._answering(context, _new_id(), request):
            if not self._engine.is_loaded:
                self._status.require_ready()
            return translate.to_model_info(self._engine.llm.model_info, self._engine.llm.default_sampling)

    async def GetStatus(self, request: api.GetStatusRequest, context: _Context) -> api.GetStatusResponse:
        async with self._answering(context, _new_id(), request):
            return translate.to_status(
                self._status.state,
                self._status.detail,
                uptime_s=self._status.uptime_s,
                load=self._engine.load_progress,
                stats=self._engine.stats,
                counters=self.counters,
                profiling=self._engine.profiled_request_id is not None,
                engine_heartbeat_age_s=self._engine.heartbeat_age_s,
            )

    async def Abort(self, request: api.AbortRequest, context: _Context) -> api.AbortResponse:
        async with self._answering(context, _new_id(), request):
            translate.require_request_id(request.request_id)
            usage = await self._engine.abort(request.request_id)
            if usage is None:
                raise UnknownRequestError(request.request_id)
            return api.AbortResponse(usage=translate.to_usage(usage))

    async def refuse_malformed(self, method: str, context: _Context) -> None:
        """Ends a call of any service's method whose request could not be parsed."""
        error = InvalidRequestError(FieldViolation("request", "is not a message of this method in protobuf's encoding"))
        rpc = method.rpartition("/")[2]
        if rpc in ("Generate", "Profile"):
            async with self._request(rpc, api.GenerateRequest(), context):
                raise error
        async with self._answering(context, _new_id(), None):
            raise error

    # ---- parts of a request ----------------------------------------------------------------------------------------

    async def _prepared(self, request: Any, prepare: Callable[[], _Result]) -> _Result:
        """What the engine is to do, after every check that it makes."""
        prepared = await self._on_text_thread(request, prepare)
        # It took a while, in which the server may have begun to drain.
        self._status.require_ready()
        return prepared

    async def _on_text_thread(self, request: Any, function: Callable[[], _Result]) -> _Result:
        translate.require_text_size(request, self._config.max_text_bytes)
        return await self._text_threads.run(function, request.ByteSize())

    async def _write(self, context: _Context, response: Any) -> None:
        """Sends a message, waiting for the client to take it. Raises SlowClientError when it does not."""
        try:
            async with asyncio.timeout(self._config.stalled_client_s):
                await context.write(response)
        except TimeoutError:
            raise SlowClientError.stalled(self._config.stalled_client_s) from None

    @contextlib.asynccontextmanager
    async def _request(
        self, rpc: str, request: api.GenerateRequest | api.ProfileRequest, context: _Context
    ) -> AsyncIterator[RequestRecord]:
        """A request from its arrival to its end, counted and logged; refused at once where none is taken."""
        request_id = request.request_id if translate.is_request_id(request.request_id) else _new_id()
        record = RequestRecord(self.counters, rpc, request_id, context.peer())
        async with self._answering(context, request_id, request, record):
            self._status.require_ready()
            if request.request_id:
                translate.require_request_id(request.request_id)
            yield record

    @contextlib.asynccontextmanager
    async def _answering(
        self, context: _Context, request_id: str, request: Any, record: RequestRecord | None = None
    ) -> AsyncIterator[None]:
        """Ends the call as its body ends: normally, cancelled, or with the status of the error it raises."""
        self._calls_in_flight += 1
        try:
            if self._calls_in_flight > self._config.max_in_flight and not isinstance(request, api.GetStatusRequest):
                raise QueueFullError(self._calls_in_flight - 1, self._config.max_in_flight, self._s_per_call)
            yield
            self._note_answered()
            if record:
                record.finish()
        except asyncio.CancelledError:
            if record:
                record.end("deadline_exceeded" if _deadline_has_passed(context) else "cancelled")
            raise
        except Exception as error:
            if context.cancelled():
                # A write found the client gone before its cancellation reached us.
                if record:
                    record.end("cancelled")
                raise asyncio.CancelledError from error
            await self._refuse(context, request_id, request, error, record)
        finally:
            self._calls_in_flight -= 1
            self._call_ended.set()

    def _note_answered(self) -> None:
        now = time.monotonic()
        self._s_per_call += 0.1 * (min(now - self._last_answered, 1.0) - self._s_per_call)
        self._last_answered = now

    async def _refuse(
        self, context: _Context, request_id: str, request: Any, error: Exception, record: RequestRecord | None
    ) -> None:
        """Ends the call with the error's status. Bugs are logged whole; the client gets the id to find them by."""
        if isinstance(error, InvalidRequestError):
            error = translate.in_fields_of(request, error)
        kind = translate.kind_of(error)
        is_bug = kind.code is grpc.StatusCode.INTERNAL
        trace = error if is_bug and not isinstance(error, EngineFailedError) else None  # which the engine logged once
        if record:
            record.note(reason=kind.reason)
            if isinstance(error, InvalidRequestError):
                # What is wrong with them quotes the request, and texts of users have no place in a log.
                record.note(fields=",".join(v.field for v in error.violations)[:_MAX_LOGGED_CHARS])
            else:
                record.note(message=str(error)[:_MAX_LOGGED_CHARS])
            record.end(kind.outcome, level=logging.ERROR if is_bug else logging.INFO, error=trace)
        elif is_bug:
            log(logging.ERROR, "failed", error=trace, request_id=request_id, rpc=type(request).__name__)
        place_s = getattr(error, "retry_after_s", None)
        hints = self._hints[kind.reason] if kind.outcome == "rejected" else RetryHints()
        retry_after_s = None if place_s is None else hints.delay_s(place_s)
        # The status waits behind what the client has not read; to one that never reads again it is not worth a place.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.stalled_client_s):
                await context.abort_with_status(translate.to_grpc_status(error, request_id, retry_after_s))


def _new_id() -> str:
    return uuid.uuid4().hex


def _deadline_has_passed(context: _Context) -> bool:
    left_s = context.time_remaining()
    return left_s is not None and left_s < _DEADLINE_TOLERANCE_S
