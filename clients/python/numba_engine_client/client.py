"""Client: the service as plain calls and iterators."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar, Unpack

import grpc

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


class Client:
    """A connection to one server. Thread-safe; close it, or use it as a context manager.

    ``target`` is ``host:port`` or any gRPC name (``unix:/path``). Without ``credentials`` the connection is plaintext;
    ``grpc.ssl_channel_credentials()`` makes it TLS. ``metadata`` goes with every call, such as
    ``[("authorization", "Bearer …")]``. ``timeout`` is the default deadline of every call in seconds, None for none.

    Every call raises a subclass of ``InferenceError``.
    """

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
            self._channel = grpc.insecure_channel(target, options=options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=options)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._check_health: Any = self._channel.unary_unary(HEALTH_CHECK)
        self._metadata = tuple(metadata)
        self._timeout = timeout
        self._retry = retry

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._channel.close()

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
    ) -> GenerationStream:
        """Continue a ``prompt`` or ``token_ids``, or answer a chat's ``messages`` (a text is one user message).

        The call is made at once; iterate to receive its deltas. Leaving the stream early cancels it: use ``with``, or
        ``close()``, where it might stay referenced.
        """
        request = pb.GenerateRequest(
            request_id=request_id,
            sampling=requests.sampling_params(sampling),
            include_prompt_token_ids=include_prompt_token_ids,
            **requests.input_fields(prompt, token_ids, messages),
        )
        return GenerationStream(lambda left: self._call(self._stub.Generate, request, left), self._timer(timeout))

    def generate_text(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: str | Sequence[Message] | None = None,
        request_id: str = "",
        timeout: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> str:
        """The whole text of a generation. ``generate(…).read()`` gives its tokens, usage and timings too."""
        stream = self.generate(
            prompt, token_ids=token_ids, messages=messages, request_id=request_id, timeout=timeout, **sampling
        )
        return stream.read().text

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
    ) -> ProfileStream:
        """Measure while generating greedily from a prompt, from ``synthetic`` ones, or for others (``live_steps``).

        Iterate over the steps; ``device``, ``model`` and ``summary`` are beside. ``on_wait`` is called whenever there
        is no live traffic to measure.
        """
        request = requests.profile(prompt, token_ids, messages, request_id, profiling)
        return ProfileStream(lambda left: self._call(self._stub.Profile, request, left), self._timer(timeout), on_wait)

    def abort(self, request_id: str, *, timeout: float | None = None) -> pb.Usage:
        """End another request, queued or running: its stream finishes with ``aborted``. What it had used."""
        response = self._unary(self._stub.Abort, pb.AbortRequest(request_id=request_id), timeout)
        usage: pb.Usage = response.usage
        return usage

    def estimate_throughput(
        self, gpus: str | Sequence[str] = (), *, timeout: float | None = None, **planning: Unpack[Planning]
    ) -> list[pb.ThroughputEstimate]:
        """How fast a model can at best run on each GPU, by formula; without a name, on each of the datasheet table."""
        request = requests.estimate_throughput(gpus, planning)
        return list(self._unary(self._stub.EstimateThroughput, request, timeout).estimates)

    # ---- text ------------------------------------------------------------------------------------------------------

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: str | Sequence[Message] | None = None,
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """The token ids of a text or of a chat, as ``generate`` would be given them."""
        request = requests.tokenize(text, messages, add_special_tokens)
        return list(self._unary(self._stub.Tokenize, request, timeout).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout: float | None = None
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=requests.ids(token_ids), skip_special_tokens=skip_special_tokens)
        return str(self._unary(self._stub.Detokenize, request, timeout).text)

    # ---- facts -----------------------------------------------------------------------------------------------------

    def model_info(self, *, timeout: float | None = None) -> pb.GetModelInfoResponse:
        """What is loaded, and on what it runs."""
        info: pb.GetModelInfoResponse = self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout)
        return info

    def status(self, *, timeout: float | None = None) -> pb.GetStatusResponse:
        """The state of server and engine now."""
        status: pb.GetStatusResponse = self._unary(self._stub.GetStatus, pb.GetStatusRequest(), timeout)
        return status

    def health(self, service: str = SERVICE, *, timeout: float | None = None) -> str:
        """``SERVING``, ``NOT_SERVING`` or ``SERVICE_UNKNOWN``, of ``grpc.health.v1``. ``"liveness"``: it answers."""
        response: bytes = self._unary(self._check_health, requests.health_request(service), timeout)
        return requests.health_status(response)

    def wait_ready(self, timeout: float | None = None, on_wait: Callable[[str], None] | None = None) -> None:
        """Return once the server takes requests; it need not even be up yet.

        ``on_wait`` is called with what the server does meanwhile. Raises TimeoutError after ``timeout`` seconds, and
        ServerError at once when the server says that its engine has failed.
        """
        timer = Timer(timeout)
        while (waiting := self._why_not_ready()) is not None:
            if timer.is_over:
                raise TimeoutError(f"not ready after {timeout:g} s: {waiting}")
            if on_wait:
                on_wait(waiting)
            time.sleep(POLL_S)

    def _why_not_ready(self) -> str | None:
        try:
            return why_not_ready(self.status(timeout=LOOK_S))
        except (UnavailableError, DeadlineExceededError) as error:
            return str(error)

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _timer(self, timeout: float | None) -> Timer:
        return Timer(self._timeout if timeout is None else timeout, self._retry)

    def _call(self, method: Any, request: Any, left_s: float | None) -> Any:
        return method(request, timeout=left_s, metadata=self._metadata)

    def _unary(self, method: Any, request: Any, timeout: float | None) -> Any:
        timer = self._timer(timeout)
        while True:
            try:
                return self._call(method, request, timer.left_s)
            except grpc.RpcError as error:
                time.sleep(timer.next_delay_s(to_error(error)))


class _Stream(Generic[_Response]):
    """A server stream that is cancelled when it is left, and called again when it was refused and a retry is due.

    No generator, for one would refer to the stream and keep a forgotten one's call alive until the next collection.
    """

    def __init__(self, start: Callable[[float | None], Any], timer: Timer) -> None:
        self._start = start
        self._timer = timer
        self._call = start(timer.left_s)
        self._begun = False
        self._closed = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the call unless it has ended. The server frees the request's place within one step."""
        self._closed = True
        self._call.cancel()

    def _next_response(self) -> _Response | None:
        """None at the end, and after close()."""
        while not self._closed:
            try:
                response: _Response | None = next(self._call, None)
                self._begun = True
                return response
            except grpc.RpcError as error:
                if self._closed:
                    break
                failure = self._failure(error)
                if self._begun:
                    raise failure from error
                time.sleep(self._timer.next_delay_s(failure))
                self._call = self._start(self._timer.left_s)
        return None

    def _failure(self, error: grpc.RpcError) -> InferenceError:
        return to_error(error)


class GenerationStream(_Stream[pb.GenerateResponse]):
    """The deltas of a generation. ``text`` and ``token_ids`` grow as it is read; ``result`` is there at the end."""

    def __init__(self, start: Callable[[float | None], Any], timer: Timer) -> None:
        super().__init__(start, timer)
        self._gathering = Gathering()

    def __enter__(self) -> GenerationStream:
        return self

    def __iter__(self) -> GenerationStream:
        return self

    def __next__(self) -> pb.GenerationDelta:
        while (response := self._next_response()) is not None:
            delta = self._gathering.add(response)
            if delta is not None:
                return delta
        if self._gathering.finished is None and not self._closed:
            raise incomplete_stream(self.text, self.token_ids)
        raise StopIteration

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

    def read(self) -> Generation:
        """Read to the end; the whole generation."""
        for _ in self:
            pass
        return self.result

    def _failure(self, error: grpc.RpcError) -> InferenceError:
        return to_error(error, partial_text=self.text, token_ids=self.token_ids)


class ProfileStream(_Stream[pb.ProfileResponse]):
    """The measured steps of a profile. ``device`` and ``model`` are there from the first step on, ``summary`` last."""

    def __init__(
        self, start: Callable[[float | None], Any], timer: Timer, on_wait: Callable[[], None] | None = None
    ) -> None:
        super().__init__(start, timer)
        self._on_wait = on_wait
        self.device: pb.ProfiledDevice | None = None
        self.model: pb.ProfiledModel | None = None
        self.summary: pb.ProfileSummary | None = None

    def __enter__(self) -> ProfileStream:
        return self

    def __iter__(self) -> ProfileStream:
        return self

    def __next__(self) -> pb.StepProfile:
        while (response := self._next_response()) is not None:
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
        raise StopIteration
