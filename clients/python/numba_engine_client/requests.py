"""Requests built from plain Python values."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from numba_engine_api.v1 import inference_pb2 as pb


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: str


class Sampling(TypedDict, total=False):
    """Sampling parameters; what is left out (or None) is as the model's own defaults say.

    Ranges and meanings stand in ``inference.proto``, message ``SamplingParams``.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    time_limit_s: float | None


class Synthetic(TypedDict, total=False):
    """Sequences of random tokens, for a profile: how many at once, and tokens of each prompt."""

    num_seqs: int
    prompt_len: int


class Profiling(TypedDict, total=False):
    """What a profile runs and tells; what is left out (or None) is as ``inference.proto``, ProfileRequest, says."""

    synthetic: Synthetic | None
    """Instead of a prompt."""
    live_steps: int | None
    """Instead of a prompt: so many steps of what other requests ask for."""
    num_tokens: int | None
    fusion: bool | None
    detail: Literal["summary", "ops", "timeline"] | None
    warm_up_steps: int | None
    unprofiled_every: int | None


class Planning(TypedDict, total=False):
    """What an estimate is of; what is left out (or None) is as ``inference.proto``, EstimateThroughputRequest, says.

    The model is the server's own, or ``config_json``, or ``num_parameters`` with all four sizes after it, or none.
    """

    config_json: str | None
    num_parameters: int | None
    num_layers: int | None
    hidden_size: int | None
    num_kv_heads: int | None
    head_dim: int | None
    weight_format: str | None
    kv_format: str | None
    batch: int | None
    context: int | None
    tensor_parallel: int | None
    acceptance: float | None
    draft_len: int | None
    draft_cost: float | None
    target_tokens_per_s: float | None


_SIZE = ("num_parameters", "num_layers", "hidden_size", "num_kv_heads", "head_dim")
_SPECULATION = ("acceptance", "draft_len", "draft_cost")


def sampling_params(sampling: Mapping[str, Any]) -> pb.SamplingParams:
    """Raises TypeError or ValueError naming a parameter that is unknown or of the wrong kind."""
    message = pb.SamplingParams()
    for name, value in sampling.items():
        if name not in Sampling.__annotations__:
            raise TypeError(f"{name!r} is no sampling parameter; there are: {', '.join(Sampling.__annotations__)}")
        if value is None:
            continue
        try:
            if name == "logit_bias":
                message.logit_bias.update(value)
            elif name == "stop":
                message.stop.extend([value] if isinstance(value, str) else value)
            elif name == "stop_token_ids":
                message.stop_token_ids.extend(ids(value))
            else:
                _set(message, name, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} = {value!r}: {error}") from error
    return message


def input_fields(
    prompt: str | None, token_ids: Sequence[int] | None, messages: str | Sequence[Message] | None
) -> dict[str, Any]:
    """The one input of a Generate or Profile request. ``messages`` may be the text of a single user message."""
    given = [value for value in (prompt, token_ids, messages) if value is not None]
    if len(given) != 1:
        raise TypeError("give exactly one of prompt, token_ids and messages")
    if token_ids is not None:
        return {"token_ids": pb.TokenIds(ids=ids(token_ids))}
    if messages is not None:
        return {"chat": chat(messages)}
    return {"prompt": prompt}


def chat(messages: str | Sequence[Message]) -> pb.Chat:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return pb.Chat(messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in messages])


def profile(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: str | Sequence[Message] | None,
    request_id: str,
    profiling: Mapping[str, Any],
) -> pb.ProfileRequest:
    """Raises TypeError or ValueError naming a parameter that is unknown, of the wrong kind, or one too many."""
    given = _known(profiling, Profiling)
    synthetic, live_steps = given.pop("synthetic", None), given.pop("live_steps", None)
    detail = given.pop("detail", None)
    inputs = [value for value in (prompt, token_ids, messages, synthetic, live_steps) if value is not None]
    if len(inputs) != 1:
        raise TypeError("give exactly one of prompt, token_ids, messages, synthetic and live_steps")
    request = pb.ProfileRequest(request_id=request_id)
    if synthetic is not None:
        request.synthetic.CopyFrom(pb.SyntheticWorkload(**synthetic))
    elif live_steps is not None:
        request.live.num_steps = live_steps
    else:
        request.MergeFrom(pb.ProfileRequest(**input_fields(prompt, token_ids, messages)))
    if detail is not None:
        if detail not in ("summary", "ops", "timeline"):
            raise ValueError(f"detail = {detail!r}: it is summary, ops or timeline")
        given["detail"] = pb.ProfileDetail.Value(f"PROFILE_DETAIL_{detail.upper()}")
    _set_all(request, given)
    return request


def estimate_throughput(gpus: str | Sequence[str], planning: Mapping[str, Any]) -> pb.EstimateThroughputRequest:
    """Raises TypeError or ValueError naming a parameter that is unknown or of the wrong kind."""
    given = _known(planning, Planning)
    request = pb.EstimateThroughputRequest(gpus=[gpus] if isinstance(gpus, str) else gpus)
    size = {name: given.pop(name) for name in _SIZE if name in given}
    speculation = {name: given.pop(name) for name in _SPECULATION if name in given}
    if size and "config_json" in given:
        raise TypeError("give either config_json or num_parameters")
    if size and "num_parameters" not in size:
        raise TypeError(f"{', '.join(size)}: goes with num_parameters")
    if speculation and "acceptance" not in speculation:
        raise TypeError(f"{', '.join(speculation)}: goes with acceptance")
    _set_all(request.size, size)
    if speculation:
        request.speculation.SetInParent()
    _set_all(request.speculation, speculation)
    _set_all(request, given)
    return request


def _known(given: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Those that are not None. Raises TypeError naming one that is unknown."""
    for name in given:
        if name not in kind.__annotations__:
            raise TypeError(f"{name!r} is no parameter; there are: {', '.join(kind.__annotations__)}")
    return {name: value for name, value in given.items() if value is not None}


def ids(token_ids: Sequence[int]) -> list[int]:
    """Raises TypeError for text and bytes, whose members are not meant as ids, and for members that are no integers."""
    if isinstance(token_ids, str | bytes | bytearray | memoryview | Mapping):
        raise TypeError(f"token ids must be a list of integers, got {type(token_ids).__name__}")
    given = list(token_ids)
    if any(isinstance(token_id, bool) for token_id in given):
        raise TypeError("token ids must be integers, got bool")
    return [operator.index(token_id) for token_id in given]


def _set(message: Any, name: str, value: Any) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    if isinstance(value, bool) != (field.type == field.TYPE_BOOL):  # protobuf takes True as 1, and 1 as True
        raise TypeError(f"must be of type {type(getattr(message, name)).__name__}")
    setattr(message, name, value)


def _set_all(message: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        try:
            _set(message, name, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} = {value!r}: {error}") from error


def tokenize(
    text: str | None, messages: str | Sequence[Message] | None, add_special_tokens: bool | None
) -> pb.TokenizeRequest:
    if (text is None) == (messages is None):
        raise TypeError("give either text or messages")
    given: dict[str, Any] = {"text": text} if messages is None else {"chat": chat(messages)}
    if add_special_tokens is not None:
        given["add_special_tokens"] = add_special_tokens
    return pb.TokenizeRequest(**given)


def health_request(service: str) -> bytes:
    """A ``grpc.health.v1.HealthCheckRequest``: field 1 is the name. By hand, for it saves a dependency."""
    name = service.encode()
    assert len(name) < 128, "one byte holds the length"
    return b"\x0a" + bytes([len(name)]) + name if name else b""


def health_status(response: bytes) -> str:
    """The status of a ``grpc.health.v1.HealthCheckResponse``: field 1, an enum, absent when 0."""
    number = response[1] if response[:1] == b"\x08" and len(response) > 1 else 0
    return {1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}.get(number, "UNKNOWN")
