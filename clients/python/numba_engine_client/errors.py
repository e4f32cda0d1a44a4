"""What the server answers when it does not answer: one exception per kind of status, with the server's details."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of the request that is wrong, with its path such as ``sampling.top_p``, and why."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """The ``google.rpc`` details of an error that this client knows."""

    violations: tuple[FieldViolation, ...] = ()
    retry_delay_s: float | None = None
    reason: str = ""
    """Machine-readable, of ErrorInfo."""
    metadata: dict[str, str] = field(default_factory=dict)
    request_id: str = ""
    """Under which the server logged the matter."""


class InferenceError(Exception):
    """A call that failed. ``partial_text`` and ``token_ids`` are what a stream had given until then."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        details: ErrorDetails | None = None,
        *,
        partial_text: str = "",
        token_ids: Iterable[int] = (),
    ) -> None:
        self.code = code
        self.message = message
        self.details = details or ErrorDetails()
        self.partial_text = partial_text
        self.token_ids = tuple(token_ids)
        super().__init__(f"{code.name}: {message}")

    def __reduce__(self) -> tuple[Callable[..., InferenceError], tuple[Any, ...]]:
        return _restored, (type(self), self.code, self.message, self.details, self.partial_text, self.token_ids)

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        return self.details.violations

    @property
    def retry_delay_s(self) -> float | None:
        """How long the server asks to wait before trying again; None where it says nothing."""
        return self.details.retry_delay_s

    @property
    def request_id(self) -> str:
        return self.details.request_id


def _restored(
    kind: type[InferenceError],
    code: grpc.StatusCode,
    message: str,
    details: ErrorDetails,
    partial_text: str,
    token_ids: tuple[int, ...],
) -> InferenceError:
    """What pickle and copy make of an error."""
    return kind(code, message, details, partial_text=partial_text, token_ids=token_ids)


class InvalidRequestError(InferenceError):
    """INVALID_ARGUMENT, OUT_OF_RANGE: see ``violations``."""


class FailedPreconditionError(InferenceError):
    """FAILED_PRECONDITION: the loaded model or the server cannot do this, such as a chat without template."""


class NotFoundError(InferenceError):
    """NOT_FOUND: no such request (any more)."""


class AlreadyExistsError(InferenceError):
    """ALREADY_EXISTS: a request with this id is in the engine."""


class OverloadedError(InferenceError):
    """RESOURCE_EXHAUSTED: a queue is full, or this client read too slowly; see ``retry_delay_s``."""


class UnavailableError(InferenceError):
    """UNAVAILABLE: not reachable, still loading, shutting down, or the connection broke."""


class DeadlineExceededError(InferenceError):
    """DEADLINE_EXCEEDED: the call's ``timeout`` is over. ``time_limit_s`` ends a generation without an error."""


class CancelledError(InferenceError):
    """CANCELLED: the call was cancelled, by this side or on the way."""


class AuthenticationError(InferenceError):
    """UNAUTHENTICATED, PERMISSION_DENIED."""


class UnimplementedError(InferenceError):
    """UNIMPLEMENTED: the server is no numba_engine service or an older one."""


class ServerError(InferenceError):
    """INTERNAL and the like: a failure of the server; ``request_id`` finds it in the server's log."""


_BY_CODE: dict[grpc.StatusCode, type[InferenceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
}


def to_error(error: grpc.RpcError, *, partial_text: str = "", token_ids: Iterable[int] = ()) -> InferenceError:
    """The exception for a failed call, of grpc or grpc.aio."""
    # RpcError itself promises no methods; every error that grpc raises from a call has these.
    call: Any = error
    code = call.code() or grpc.StatusCode.UNKNOWN
    kind = _BY_CODE.get(code, ServerError)
    details = _details(call.trailing_metadata() or ())
    return kind(code, call.details() or "", details, partial_text=partial_text, token_ids=token_ids)


def incomplete_stream(partial_text: str, token_ids: Iterable[int]) -> ServerError:
    """A stream that ended well by its status, but before its last message."""
    message = "the stream ended before its last message"
    return ServerError(grpc.StatusCode.DATA_LOSS, message, partial_text=partial_text, token_ids=token_ids)


def _details(trailing_metadata: Iterable[tuple[str, str | bytes]]) -> ErrorDetails:
    packed = next((value for key, value in trailing_metadata if key == "grpc-status-details-bin"), b"")
    status = status_pb2.Status()
    bad_request = error_details_pb2.BadRequest()
    retry_info = error_details_pb2.RetryInfo()
    error_info = error_details_pb2.ErrorInfo()
    request_info = error_details_pb2.RequestInfo()
    retry_delay_s = None
    try:
        status.ParseFromString(packed if isinstance(packed, bytes) else packed.encode("latin-1"))
        for detail in status.details:
            if detail.Unpack(retry_info):
                retry_delay_s = retry_info.retry_delay.seconds + retry_info.retry_delay.nanos * 1e-9
            for message in (bad_request, error_info, request_info):
                detail.Unpack(message)
    except DecodeError:
        pass  # details are an extra: the status itself is still told
    return ErrorDetails(
        violations=tuple(FieldViolation(v.field, v.description) for v in bad_request.field_violations),
        retry_delay_s=retry_delay_s,
        reason=error_info.reason,
        metadata=dict(error_info.metadata),
        request_id=request_info.request_id,
    )
