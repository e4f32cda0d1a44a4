"""Requests built from plain Python values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

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
            elif name in ("stop", "stop_token_ids"):
                getattr(message, name).extend([value] if isinstance(value, str) else value)
            else:
                setattr(message, name, value)
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
        return {"token_ids": pb.TokenIds(ids=token_ids)}
    if messages is not None:
        return {"chat": chat(messages)}
    return {"prompt": prompt}


def chat(messages: str | Sequence[Message]) -> pb.Chat:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return pb.Chat(messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in messages])


def profile(
    inputs: Mapping[str, Any], request_id: str, num_tokens: int | None, fusion: bool | None
) -> pb.ProfileRequest:
    """``inputs`` as of input_fields."""
    optional = {"num_tokens": num_tokens, "fusion": fusion}
    given: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
    return pb.ProfileRequest(request_id=request_id, **given, **inputs)


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
