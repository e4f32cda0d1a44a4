"""ValidRequest: a prompt and its parameters, checked once, before they come to the engine's thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_engine.errors import FieldViolation, InvalidRequestError
from numba_engine.outputs import ModelInfo
from numba_engine.plain_values import is_many, plain_number
from numba_engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """What an engine can run. Only ``validated`` makes one, so that nothing checks it again."""

    token_ids: tuple[int, ...]
    params: SamplingParams


def members_of(field: str, value: object, *, meant: str = "a list of token ids") -> tuple[Any, ...]:
    """The members, in their order, of a list, a tuple, an array or another iterable; not yet looked at.

    Raises:
        InvalidRequestError: it is none, or has no order.
    """
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not is_many(value) or isinstance(value, Set):
        raise InvalidRequestError(FieldViolation(field, f"must be {meant}, got {type(value).__name__}"))
    return tuple(value)  # type: ignore[arg-type]


def validated(token_ids: Sequence[int], params: SamplingParams, model: ModelInfo) -> ValidRequest:
    """The request, if the model has its tokens and room for one more.

    Raises:
        InvalidRequestError: naming each field that is wrong.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(FieldViolation("params", f"must be SamplingParams, got {type(params).__name__}"))
    bad: list[FieldViolation | None] = []
    if not token_ids:
        bad.append(FieldViolation("prompt", "has no tokens; give at least one"))
    if len(token_ids) >= model.max_model_len:
        limit = (
            f"is {len(token_ids)} tokens, but the context holds {model.max_model_len}, of which one is left for the"
            " output"
        )
        bad.append(FieldViolation("prompt", limit))
    else:  # a look at millions of ids takes long
        token_ids = tuple(map(plain_number, token_ids))
        bad.append(not_in_vocabulary("prompt", token_ids, model))
    bad.append(not_in_vocabulary("sampling.stop_token_ids", params.stop_token_ids, model))
    bad.append(not_in_vocabulary("sampling.logit_bias", params.logit_bias, model))
    if violations := [violation for violation in bad if violation]:
        raise InvalidRequestError(*violations)
    return ValidRequest(tuple(token_ids), params)


def not_in_vocabulary(field: str, token_ids: Iterable[int], model: ModelInfo) -> FieldViolation | None:
    """What is wrong with the first of the field's ids that is not a token; None where all are."""
    wrong = next((i for i in token_ids if type(i) is not int or not 0 <= i < model.vocab_size), None)
    if wrong is None:
        return None
    return FieldViolation(field, f"token id {wrong!r} is not in the vocabulary (0 to {model.vocab_size - 1})")
