"""Between the API's messages and the engine's values, and from errors to gRPC statuses; no other file knows both."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
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
    OpProfile,
    OutOfMemoryError,
    PositionLogprobs,
    ProfileSummary,
    QueueFullError,
    RequestOutput,
    SamplingParams,
    StepProfile,
    Timings,
    TokenLogprob,
    Usage,
)
from numba_engine_api.v1 import inference_pb2 as api
from service.engine_loop import LoadProgress, ProfiledStep, ProfileEnd, ProfileEvent
from service.errors import (
    DuplicateRequestError,
    EngineFailedError,
    NoChatTemplateError,
    NotReadyError,
    ProfileBusyError,
    SlowClientError,
    StartupError,
    UnknownRequestError,
)
from service.status import State
from service.telemetry import Counters

ERROR_DOMAIN = "numba-engine"
_DEFAULT_PROFILE_TOKENS = 32

# ---------------------------------------------------------------- requests


def is_request_id(request_id: str) -> bool:
    return re.fullmatch(r"[!-~]{1,128}", request_id) is not None


def require_request_id(request_id: str) -> None:
    """Raises InvalidRequestError."""
    if not is_request_id(request_id):
        raise InvalidRequestError(FieldViolation("request_id", "must be 1 to 128 visible ASCII characters"))


def prepared(llm: LLM, request: api.GenerateRequest | api.ProfileRequest) -> tuple[list[int], SamplingParams]:
    """The prompt's token ids and the parameters. Takes long for a long prompt.

    Raises:
        InvalidRequestError: after every check that the engine makes.
        NoChatTemplateError
    """
    if isinstance(request, api.GenerateRequest):
        params = to_sampling_params(request.sampling, llm.default_sampling)
    else:
        params = to_profile_sampling_params(request)
    prompt: str | list[int]
    match _input_of(request):
        case "prompt":
            prompt = request.prompt
        case "token_ids":
            prompt = list(request.token_ids.ids)
        case _:
            prompt = _chat_token_ids(llm, request.chat)
    return llm.validate(prompt, params), params


def tokenized(llm: LLM, request: api.TokenizeRequest) -> api.TokenizeResponse:
    """Takes long for a long text. Raises InvalidRequestError, NoChatTemplateError."""
    if _input_of(request) == "chat":
        return api.TokenizeResponse(token_ids=_chat_token_ids(llm, request.chat))
    add = request.add_special_tokens if request.HasField("add_special_tokens") else True
    return api.TokenizeResponse(token_ids=llm.tokenize(request.text, add_special_tokens=add))


def detokenized(llm: LLM, request: api.DetokenizeRequest) -> api.DetokenizeResponse:
    """Takes long for many tokens. Raises InvalidRequestError."""
    text = llm.detokenize(list(request.token_ids), skip_special_tokens=request.skip_special_tokens)
    return api.DetokenizeResponse(text=text)


def _input_of(request: api.GenerateRequest | api.ProfileRequest | api.TokenizeRequest) -> str:
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


def to_profile_sampling_params(request: api.ProfileRequest) -> SamplingParams:
    """Greedy and past end tokens, so that a profile does the same work each time. Raises InvalidRequestError."""
    num_tokens = request.num_tokens if request.HasField("num_tokens") else _DEFAULT_PROFILE_TOKENS
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)


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

_FINISH_REASON = {
    FinishReason.STOP_TOKEN: api.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_SEQUENCE: api.FINISH_REASON_STOP_SEQUENCE,
    FinishReason.MAX_TOKENS: api.FINISH_REASON_MAX_TOKENS,
    FinishReason.CONTEXT_FULL: api.FINISH_REASON_CONTEXT_FULL,
    FinishReason.TIME_LIMIT: api.FINISH_REASON_TIME_LIMIT,
    FinishReason.ABORTED: api.FINISH_REASON_ABORTED,
}
assert len(_FINISH_REASON) == len(FinishReason)


def to_started(request: api.GenerateRequest, request_id: str, prompt_token_ids: list[int]) -> api.GenerateResponse:
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
                finish_reason=_FINISH_REASON[output.finish_reason],
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


# ---------------------------------------------------------------- responses of Profile


def to_profiled_device(info: ModelInfo) -> api.ProfileResponse:
    return api.ProfileResponse(
        device=api.ProfiledDevice(
            backend=info.backend,
            name=info.device_name,
            num_threads=info.num_threads,
            time_source=api.TIME_SOURCE_HOST_CLOCK,
        )
    )


def to_profiled_model(info: ModelInfo) -> api.ProfileResponse:
    return api.ProfileResponse(
        model=api.ProfiledModel(
            name=info.name,
            architecture=info.architecture,
            num_parameters=info.num_parameters,
            weight_bytes=info.weight_bytes,
            weight_formats=info.weight_formats,
            activation_dtype=info.activation_dtype,
            kv_cache_dtype=info.kv_cache_dtype,
            kv_bytes_per_token=info.kv_bytes_per_token,
        )
    )


def to_profile_response(event: ProfileEvent) -> api.ProfileResponse:
    match event:
        case ProfiledStep(profile, output):
            return api.ProfileResponse(step=_to_step_profile(profile, output.text if output else ""))
        case ProfileEnd(summary, output):
            return api.ProfileResponse(summary=_to_profile_summary(summary, output))


def _to_step_profile(step: StepProfile, text: str) -> api.StepProfile:
    return api.StepProfile(
        index=step.index,
        num_prefill_tokens=step.num_prefill_tokens,
        num_decode_tokens=step.num_decode_tokens,
        num_seqs=step.num_seqs,
        time_s=step.time_s,
        ops=map(_to_op_profile, step.ops),
        text=text,
        overhead_s=step.overhead_s,
    )


def _to_op_profile(op: OpProfile) -> api.OpProfile:
    return api.OpProfile(
        name=op.name,
        num_calls=op.num_calls,
        time_s=op.time_s,
        weight_bytes=op.weight_bytes,
        kv_bytes=op.kv_bytes,
        activation_bytes=op.activation_bytes,
        flops=op.flops,
        gbps=op.gbps,
        kv_written_bytes=op.kv_written_bytes,
        activation_written_bytes=op.activation_written_bytes,
    )


def _to_profile_summary(summary: ProfileSummary, output: RequestOutput) -> api.ProfileSummary:
    assert output.finish_reason is not None
    return api.ProfileSummary(
        num_prefill_steps=summary.num_prefill_steps,
        num_decode_steps=summary.num_decode_steps,
        prefill_tokens_per_s=summary.prefill_tokens_per_s,
        decode_tokens_per_s=summary.decode_tokens_per_s,
        read_bandwidth_gbps=summary.read_bandwidth_gbps,
        bytes_per_token=summary.bytes_per_token,
        floor_s=summary.floor_s,
        share_of_floor=summary.share_of_floor,
        ops=map(_to_op_profile, summary.ops),
        shares=(api.OpShare(name=name, share=share) for name, share in summary.shares),
        finish_reason=_FINISH_REASON[output.finish_reason],
        usage=to_usage(output.usage),
        weight_bytes_per_token=summary.weight_bytes_per_token,
        kv_bytes_per_token=summary.kv_bytes_per_token,
        overhead_s_per_step=summary.overhead_s_per_step,
    )


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
    QueueFullError: ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "rejected"),
    ProfileBusyError: ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, "PROFILE_BUSY", "rejected"),
    SlowClientError: ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CLIENT", "slow_client"),
    OutOfMemoryError: ErrorKind(grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY", "rejected"),
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


def to_grpc_status(error: Exception, request_id: str) -> grpc.Status:
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
    retry_after_s = getattr(error, "retry_after_s", None)
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
