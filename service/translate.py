"""Between the API's messages and the engine's values, and from errors to gRPC statuses.

Profiles and estimates have files of their own, ``translate_profile.py`` and ``translate_estimate.py``; no other file
knows both sides.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from numba_engine import (
    LLM,
    BackendUnavailableError,
    CheckpointError,
    ConfigError,
    EngineStats,
    FieldViolation,
    FinishReason,
    InvalidRequestError,
    ModelInfo,
    NonFiniteLogitsError,
    OutOfMemoryError,
    PositionLogprobs,
    QueueFullError,
    RequestOutput,
    SamplingParams,
    Timings,
    TokenLogprob,
    Usage,
    ValidRequest,
)
from numba_engine_api.v1 import inference_pb2 as api
from service.engine_loop import LoadProgress
from service.errors import (
    DuplicateRequestError,
    EngineFailedError,
    NoChatTemplateError,
    NotReadyError,
    ProfileBusyError,
    ProfileOffError,
    SlowClientError,
    StartupError,
    TextsFullError,
    UnknownRequestError,
)
from service.status import State
from service.telemetry import Counters

ERROR_DOMAIN = "numba-engine"

# ---------------------------------------------------------------- requests


def is_request_id(request_id: str) -> bool:
    return re.fullmatch(r"[!-~]{1,128}", request_id) is not None


def require_request_id(request_id: str) -> None:
    """Raises InvalidRequestError."""
    if not is_request_id(request_id):
        raise InvalidRequestError(FieldViolation("request_id", "must be 1 to 128 visible ASCII characters"))


def require_text_size(request: Any, max_bytes: int) -> None:
    """Raises InvalidRequestError where the request's text is too long to be worked on at all."""
    fields = request.DESCRIPTOR.fields_by_name
    for name in ("prompt", "text", "config_json"):
        if name in fields and request.HasField(name):
            _require_size(name, len(getattr(request, name).encode()), max_bytes)
    if "chat" in fields and request.HasField("chat"):
        _require_size("messages", request.chat.ByteSize(), max_bytes)
    if isinstance(request, api.DetokenizeRequest):
        num_ids, max_ids = len(request.token_ids), max_bytes // _MAX_ID_BYTES
        if num_ids > max_ids:
            raise InvalidRequestError(FieldViolation("token_ids", f"are {num_ids}; one call may have {max_ids}"))


_MAX_ID_BYTES = 4  # as varint, of vocabularies up to 2^28


def _require_size(name: str, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise InvalidRequestError(FieldViolation(name, f"is {num_bytes} bytes; one call may have {max_bytes}"))


def prepared(llm: LLM, request: api.GenerateRequest) -> ValidRequest:
    """The prompt's token ids and the parameters. Takes long for a long prompt.

    Raises:
        InvalidRequestError: after every check that the engine makes.
        NoChatTemplateError
    """
    params = to_sampling_params(request.sampling, llm.default_sampling)
    return to_valid(llm, request, params)


def to_valid(llm: LLM, request: api.GenerateRequest | api.ProfileRequest, params: SamplingParams) -> ValidRequest:
    """Of the request's prompt, token_ids or chat. Raises as ``prepared``."""
    prompt: str | list[int]
    match input_of(request):
        case "prompt":
            prompt = request.prompt
        case "token_ids":
            prompt = list(request.token_ids.ids)
        case _:
            prompt = _chat_token_ids(llm, request.chat)
    return llm.validate(prompt, params)


def tokenized(llm: LLM, request: api.TokenizeRequest) -> api.TokenizeResponse:
    """Takes long for a long text. Raises InvalidRequestError, NoChatTemplateError."""
    if input_of(request) == "chat":
        return api.TokenizeResponse(token_ids=_chat_token_ids(llm, request.chat))
    add = request.add_special_tokens if request.HasField("add_special_tokens") else True
    return api.TokenizeResponse(token_ids=llm.tokenize(request.text, add_special_tokens=add))


def detokenized(llm: LLM, request: api.DetokenizeRequest) -> api.DetokenizeResponse:
    """Takes long for many tokens. Raises InvalidRequestError."""
    text = llm.detokenize(list(request.token_ids), skip_special_tokens=request.skip_special_tokens)
    return api.DetokenizeResponse(text=text)


def input_of(request: api.GenerateRequest | api.ProfileRequest | api.TokenizeRequest) -> str:
    """The name of the input that is given. Raises InvalidRequestError where none is."""
    given = request.WhichOneof("input")
    if given is None:
        fields = ", ".join(field.name for field in request.DESCRIPTOR.oneofs_by_name["input"].fields)
        raise InvalidRequestError(FieldViolation("input", f"one of {fields} is required"))
    return given


def _chat_token_ids(llm: LLM, chat: api.Chat) -> list[int]:
    if not llm.model_info.has_chat_template:
        raise NoChatTemplateError(llm.model_info.name)
    return llm.apply_chat_template([{"role": entry.role, "content": entry.content} for entry in chat.messages])


def to_sampling_params(sampling: api.SamplingParams, defaults: SamplingParams) -> SamplingParams:
    """The request's parameters; what it leaves unset is as in ``defaults``. Raises InvalidRequestError."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingParams):
        value = getattr(sampling, field.name)
        if sampling.DESCRIPTOR.fields_by_name[field.name].has_presence:
            if sampling.HasField(field.name):
                given[field.name] = value
        elif field.name == "logit_bias":
            if value:
                given["logit_bias"] = dict(value)
        elif value:
            given[field.name] = tuple(value)
    return dataclasses.replace(defaults, **given)


def in_fields_of(request: Any, error: InvalidRequestError) -> InvalidRequestError:
    """The error with the names of engine parameters replaced by paths in the request."""
    sampling_names = {field.name for field in dataclasses.fields(SamplingParams)}
    prompt_paths = {"token_ids": "token_ids.ids", "chat": "chat.messages"}

    def path(name: str) -> str:
        if isinstance(request, api.ProfileRequest) and name == "max_tokens":
            return "num_tokens"
        if isinstance(request, api.GenerateRequest) and name in sampling_names:
            return f"sampling.{name}"
        if name.startswith("messages"):
            return f"chat.{name}"
        if name == "prompt":
            given = request.WhichOneof("input")
            return prompt_paths.get(given, given)
        return name

    return InvalidRequestError(*(FieldViolation(path(v.field), v.description) for v in error.violations))


# ---------------------------------------------------------------- responses of Generate

FINISH_REASON = {
    FinishReason.STOP_TOKEN: api.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_SEQUENCE: api.FINISH_REASON_STOP_SEQUENCE,
    FinishReason.MAX_TOKENS: api.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_FULL: api.FINISH_REASON_CONTEXT_FULL,
    FinishReason.TIME_LIMIT: api.FINISH_REASON_TIME_LIMIT,
    FinishReason.ABORTED: api.FINISH_REASON_ABORTED,
}
assert len(FINISH_REASON) == len(FinishReason)


def to_started(request: api.GenerateRequest, request_id: str, prompt_token_ids: Sequence[int]) -> api.GenerateResponse:
    return api.GenerateResponse(
        started=api.GenerationStarted(
            request_id=request_id,
            prompt_token_count=len(prompt_token_ids),
            prompt_token_ids=prompt_token_ids if request.include_prompt_token_ids else (),
        )
    )


def to_generate_responses(request: api.GenerateRequest, output: RequestOutput) -> Iterator[api.GenerateResponse]:
    """The delta of an output, unless the client would find nothing in it, and its end, if it is one."""
    with_ids = request.include_token_ids if request.HasField("include_token_ids") else True
    delta = api.GenerationDelta(
        text=output.text,
        token_ids=output.token_ids if with_ids else (),
        logprobs=map(_to_position_logprobs, output.logprobs),
    )
    if delta.text or delta.token_ids or delta.logprobs:
        yield api.GenerateResponse(delta=delta)
    if output.finish_reason is not None:
        yield api.GenerateResponse(
            finished=api.GenerationFinished(
                finish_reason=FINISH_REASON[output.finish_reason],
                stop_sequence=output.stop_sequence,
                stop_token_id=output.stop_token_id,
                usage=to_usage(output.usage),
                timings=_to_timings(output.timings) if output.timings else None,
            )
        )


def to_usage(usage: Usage) -> api.Usage:
    return api.Usage(**dataclasses.asdict(usage))


def _to_timings(timings: Timings) -> api.Timings:
    return api.Timings(**dataclasses.asdict(timings))


def _to_position_logprobs(position: PositionLogprobs) -> api.PositionLogprobs:
    return api.PositionLogprobs(
        chosen=_to_token_logprob(position.chosen), top=[_to_token_logprob(token) for token in position.top]
    )


def _to_token_logprob(token: TokenLogprob) -> api.TokenLogprob:
    return api.TokenLogprob(token_id=token.token_id, logprob=token.logprob, text=token.text)


# ---------------------------------------------------------------- model and status


def to_model_info(info: ModelInfo, default_sampling: SamplingParams) -> api.GetModelInfoResponse:
    defaults = {name: value for name, value in _shallow_dict(default_sampling).items() if value is not None}
    return api.GetModelInfoResponse(**_shallow_dict(info), default_sampling=api.SamplingParams(**defaults))


def to_engine_stats(stats: EngineStats) -> api.EngineStats:
    return api.EngineStats(**dataclasses.asdict(stats))


def to_counters(counters: Counters) -> api.ServiceCounters:
    return api.ServiceCounters(**dataclasses.asdict(counters), in_flight=counters.in_flight)


_SERVER_STATE = {
    State.LOADING: api.SERVER_STATE_LOADING,
    State.READY: api.SERVER_STATE_READY,
    State.DRAINING: api.SERVER_STATE_DRAINING,
    State.FAILED: api.SERVER_STATE_FAILED,
}


def to_status(
    state: State,
    detail: str,
    *,
    uptime_s: float,
    load: LoadProgress,
    stats: EngineStats | None,
    counters: Counters,
    profiling: bool,
    engine_heartbeat_age_s: float,
) -> api.GetStatusResponse:
    loading = state is State.LOADING
    return api.GetStatusResponse(
        state=_SERVER_STATE[state],
        detail=detail,
        uptime_s=uptime_s,
        load_done_bytes=load.done_bytes if loading else 0,
        load_total_bytes=load.total_bytes if loading else 0,
        engine=to_engine_stats(stats) if stats else None,
        counters=to_counters(counters),
        profiling=profiling,
        engine_heartbeat_age_s=engine_heartbeat_age_s,
    )


def _shallow_dict(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are: ``asdict`` would copy a mapping that cannot be copied."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


# ---------------------------------------------------------------- errors


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """What a class of errors becomes: its status, its ErrorInfo reason, the counter of requests that end so."""

    code: grpc.StatusCode
    reason: str
    outcome: str


_BUG = ErrorKind(grpc.StatusCode.INTERNAL, "INTERNAL", "failed")

KINDS: dict[type[BaseException], ErrorKind] = {
    InvalidRequestError: ErrorKind(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "invalid"),
    DuplicateRequestError: ErrorKind(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", "invalid"),
    UnknownRequestError: ErrorKind(grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST_ID", "invalid"),
    NoChatTemplateError: ErrorKind(grpc.StatusCode.FAILED_PRECONDITION, "NO_CHAT_TEMPLATE", "invalid"),
    ProfileOffError: ErrorKind(grpc.StatusCode.FAILED_PRECONDITION, "PROFILE_OFF", "invalid"),
    QueueFullError: ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "rejected"),
    TextsFullError: ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, "TEXTS_FULL", "rejected"),
    ProfileBusyError: ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, "PROFILE_BUSY", "rejected"),
    SlowClientError: ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CLIENT", "slow_client"),
    OutOfMemoryError: ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY", "rejected"),
    NonFiniteLogitsError: ErrorKind(grpc.StatusCode.FAILED_PRECONDITION, "NON_FINITE_LOGITS", "failed"),
    NotReadyError: ErrorKind(grpc.StatusCode.UNAVAILABLE, "NOT_READY", "unavailable"),
    EngineFailedError: ErrorKind(grpc.StatusCode.INTERNAL, "ENGINE_FAILED", "failed"),
    # Of starting a server; in a running one they would be bugs.
    ConfigError: _BUG,
    CheckpointError: _BUG,
    BackendUnavailableError: _BUG,
    StartupError: _BUG,
}


def kind_of(error: BaseException) -> ErrorKind:
    return next((KINDS[cls] for cls in type(error).__mro__ if cls in KINDS), _BUG)


# Errors travel in trailers, which clients refuse above 8 KiB; an error that quotes its request may be any length.
_MAX_MESSAGE_BYTES = 512
_MAX_VIOLATIONS = 8
_MAX_FIELD_BYTES = 80
_MAX_DESCRIPTION_BYTES = 200


def to_grpc_status(error: Exception, request_id: str, retry_after_s: float | None = None) -> grpc.Status:
    """The status with its details. A bug is only named by the request id: its text and trace stay in the log."""
    kind = kind_of(error)
    text = str(error)
    if kind.code is grpc.StatusCode.INTERNAL:
        cause = "the engine failed" if isinstance(error, EngineFailedError) else "internal error"
        text = f"{cause}; the server's log has it under request id {request_id}"
    details: list[message.Message] = [
        error_details_pb2.ErrorInfo(reason=kind.reason, domain=ERROR_DOMAIN),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    if isinstance(error, InvalidRequestError):
        violations = [
            error_details_pb2.BadRequest.FieldViolation(
                field=_shortened(v.field, _MAX_FIELD_BYTES),
                description=_shortened(v.description, _MAX_DESCRIPTION_BYTES),
            )
            for v in error.violations[:_MAX_VIOLATIONS]
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(retry)
    return rpc_status.to_status(
        status_pb2.Status(
            code=kind.code.value[0],
            message=_shortened(text, _MAX_MESSAGE_BYTES),
            details=[_packed(detail) for detail in details],
        )
    )


def _shortened(text: str, max_bytes: int) -> str:
    encoded = text.encode()
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - len("…".encode())].decode(errors="ignore") + "…"


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
