"""AsyncClient: the service for asyncio. Method by method as ``Client``, whose docstrings hold here too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar, Unpack

import grpc
import grpc.aio

from numba_engine_api.v1 import inference_pb2 as pb
from numba_engine_api.v1 import inference_pb2_grpc
from numba_engine_client import requests
from numba_engine_client.channel import CHANNEL_OPTIONS, HEALTH_CHECK, LOOK_S, POLL_S, SERVICE, why_not_ready
from numba_engine_client.errors import (
    DeadlineExceededError,
    InferenceError,
    UnavailableError,
    incomplete_stream,
    to_error,
)
from numba_engine_client.requests import Message, Planning, Profiling, Sampling
from numba_engine_client.results import Gathering, Generation
from numba_engine_client.retry import NO_RETRY, Retry, Timer

_Response = TypeVar("_Response")


class AsyncClient:
    """A connection to one server, for one event loop: make it inside the loop, and close it or use ``async with``."""

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Sequence[tuple[str, str]] = (),
        timeout: float | None = None,
        retry: Retry = NO_RETRY,
        channel_options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        options = [*CHANNEL_OPTIONS, *channel_options]
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=options)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, options=options)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._check_health: Any = self._channel.unary_unary(HEALTH_CHECK)
        self._metadata = tuple(metadata)
        self._timeout = timeout
        self._retry = retry

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        await self._channel.close()

    # ---- generation ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: str | Sequence[Message] | None = None,
        request_id: str = "",
        include_prompt_token_ids: bool = False,
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerationStream:
        """As ``Client.generate``, to be read with ``async for``."""
        request = pb.GenerateRequest(
            request_id=request_id,
            sampling=requests.sampling_params(sampling),
            include_prompt_token_ids=include_prompt_token_ids,
            **requests.input_fields(prompt, token_ids, messages),
        )
        return AsyncGenerationStream(lambda left: self._call(self._stub.Generate, request, left), self._timer(timeout))

    async def generate_text(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: str | Sequence[Message] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> str:
        """The whole text of a generation."""
        stream = self.generate(
            prompt, token_ids=token_ids, messages=messages, request_id=request_id, timeout=timeout, **sampling
        )
        return (await stream.read()).text

    def profile(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: str | Sequence[Message] | None = None,
        request_id: str = "",
        on_wait: Callable[[], None] | None = None,
        timeout: float | None = None,
        **profiling: Unpack[Profiling],
    ) -> AsyncProfileStream:
        """As ``Client.profile``, to be read with ``async for``."""
        request = requests.profile(prompt, token_ids, messages, request_id, profiling)
        return AsyncProfileStream(
            lambda left: self._call(self._stub.Profile, request, left), self._timer(timeout), on_wait
        )

    async def abort(self, request_id: str, *, timeout: float | None = None) -> pb.Usage:
        """End another request; what it had used."""
        usage: pb.Usage = (await self._unary(self._stub.Abort, pb.AbortRequest(request_id=request_id), timeout)).usage
        return usage

    async def estimate_throughput(
        self, gpus: str | Sequence[str] = (), *, timeout: float | None = None, **planning: Unpack[Planning]
    ) -> list[pb.ThroughputEstimate]:
        """How fast a model can at best run on each GPU, by formula; without a name, on each of the datasheet table."""
        request = requests.estimate_throughput(gpus, planning)
        return list((await self._unary(self._stub.EstimateThroughput, request, timeout)).estimates)

    # ---- text ------------------------------------------------------------------------------------------------------

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: str | Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """The token ids of a text or of a chat."""
        request = requests.tokenize(text, messages, add_special_tokens)
        return list((await self._unary(self._stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=requests.ids(token_ids), skip_special_tokens=skip_special_tokens)
        return str((await self._unary(self._stub.Detokenize, request, timeout)).text)

    # ---- facts -----------------------------------------------------------------------------------------------------

    async def model_info(self, *, timeout: float | None = None) -> pb.GetModelInfoResponse:
        """What is loaded, and on what it runs."""
        info: pb.GetModelInfoResponse = await self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout)
        return info

    async def status(self, *, timeout: float | None = None) -> pb.GetStatusResponse:
        """The state of server and engine now."""
        status: pb.GetStatusResponse = await self._unary(self._stub.GetStatus, pb.GetStatusRequest(), timeout)
        return status

    async def health(self, service: str = SERVICE, *, timeout: float | None = None) -> str:
        """``SERVING``, ``NOT_SERVING`` or ``SERVICE_UNKNOWN``."""
        response: bytes = await self._unary(self._check_health, requests.health_request(service), timeout)
        return requests.health_status(response)

    async def wait_ready(self, timeout: float | None = None, on_wait: Callable[[str], None] | None = None) -> None:
        """Return once the server takes requests; as ``Client.wait_ready``."""
        timer = Timer(timeout)
        while (waiting := await self._why_not_ready()) is not None:
            if timer.is_over:
                raise TimeoutError(f"not ready after {timeout:g} s: {waiting}")
            if on_wait:
                on_wait(waiting)
            await asyncio.sleep(POLL_S)

    async def _why_not_ready(self) -> str | None:
        try:
            return why_not_ready(await self.status(timeout=LOOK_S))
        except (UnavailableError, DeadlineExceededError) as error:
            return str(error)

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _timer(self, timeout: float | None) -> Timer:
        return Timer(self._timeout if timeout is None else timeout, self._retry)

    def _call(self, method: Any, request: Any, left_s: float | None) -> Any:
        return method(request, timeout=left_s, metadata=self._metadata)

    async def _unary(self, method: Any, request: Any, timeout: float | None) -> Any:
        timer = self._timer(timeout)
        while True:
            try:
                return await self._call(method, request, timer.left_s)
            except grpc.RpcError as error:
                await asyncio.sleep(timer.next_delay_s(to_error(error)))


class _AsyncStream(Generic[_Response]):
    """As ``Client``'s streams: cancelled when it is left, called again when it was refused and a retry is due."""

    def __init__(self, start: Callable[[float | None], Any], timer: Timer) -> None:
        self._start = start
        self._timer = timer
        self._call = start(timer.left_s)
        self._begun = False
        self._closed = False

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the call unless it has ended."""
        self._closed = True
        self._call.cancel()

    async def _next_response(self) -> _Response | None:
        """None at the end, and after close()."""
        while not self._closed:
            try:
                response = await self._call.read()
                self._begun = True
                return None if response is grpc.aio.EOF else response
            except grpc.RpcError as error:
                if self._closed:
                    break
                failure = self._failure(error)
                if self._begun:
                    raise failure from error
                await asyncio.sleep(self._timer.next_delay_s(failure))
                self._call = self._start(self._timer.left_s)
            except asyncio.CancelledError:
                # Of the call, by close() from another task, and not of the task that reads.
                if self._closed and not _is_cancelled(asyncio.current_task()):
                    break
                raise
        return None

    def _failure(self, error: grpc.RpcError) -> InferenceError:
        return to_error(error)


def _is_cancelled(task: asyncio.Task[Any] | None) -> bool:
    return task is not None and task.cancelling() > 0


class AsyncGenerationStream(_AsyncStream[pb.GenerateResponse]):
    """The deltas of a generation. ``text`` and ``token_ids`` grow as it is read; ``result`` is there at the end."""

    def __init__(self, start: Callable[[float | None], Any], timer: Timer) -> None:
        super().__init__(start, timer)
        self._gathering = Gathering()

    async def __aenter__(self) -> AsyncGenerationStream:
        return self

    def __aiter__(self) -> AsyncGenerationStream:
        return self

    async def __anext__(self) -> pb.GenerationDelta:
        while (response := await self._next_response()) is not None:
            delta = self._gathering.add(response)
            if delta is not None:
                return delta
        if self._gathering.finished is None and not self._closed:
            raise incomplete_stream(self.text, self.token_ids)
        raise StopAsyncIteration

    @property
    def request_id(self) -> str:
        """The request's id; empty until the first message was read."""
        return self._gathering.request_id

    @property
    def text(self) -> str:
        """All text so far."""
        return self._gathering.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All token ids so far."""
        return tuple(self._gathering.token_ids)

    @property
    def result(self) -> Generation:
        """The whole generation. Raises RuntimeError before the end of the stream."""
        return self._gathering.result()

    async def read(self) -> Generation:
        """Read to the end; the whole generation."""
        async for _ in self:
            pass
        return self.result

    def _failure(self, error: grpc.RpcError) -> InferenceError:
        return to_error(error, partial_text=self.text, token_ids=self.token_ids)


class AsyncProfileStream(_AsyncStream[pb.ProfileResponse]):
    """The measured steps of a profile. ``device`` and ``model`` are there from the first step on, ``summary`` last."""

    def __init__(
        self, start: Callable[[float | None], Any], timer: Timer, on_wait: Callable[[], None] | None = None
    ) -> None:
        super().__init__(start, timer)
        self._on_wait = on_wait
        self.device: pb.ProfiledDevice | None = None
        self.model: pb.ProfiledModel | None = None
        self.summary: pb.ProfileSummary | None = None

    async def __aenter__(self) -> AsyncProfileStream:
        return self

    def __aiter__(self) -> AsyncProfileStream:
        return self

    async def __anext__(self) -> pb.StepProfile:
        while (response := await self._next_response()) is not None:
            match response.WhichOneof("event"):
                case "device":
                    self.device = response.device
                case "model":
                    self.model = response.model
                case "summary":
                    self.summary = response.summary
                case "waiting" if self._on_wait:
                    self._on_wait()
                case "step":
                    return response.step
        if self.summary is None and not self._closed:
            raise incomplete_stream("", ())
        raise StopAsyncIteration
