"""Every public value and error travels: it can be pickled, copied, hashed and written as JSON."""

from __future__ import annotations

import copy
import json
import pickle
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import pytest

import numba_engine
from numba_engine import EngineConfig, InvalidRequestError, SamplingParams, errors
from numba_engine.errors import FieldViolation, NumbaEngineError
from numba_engine.formats import FORMATS
from numba_engine.outputs import Completion, FinishReason, PositionLogprobs, Timings, TokenLogprob, Usage
from numba_engine_client import errors as client_errors

COMPLETION = Completion(
    prompt_token_ids=(1, 2),
    token_ids=(3,),
    text="é",
    finish_reason=FinishReason.STOP_SEQUENCE,
    stop_sequence="x",
    stop_token_id=None,
    logprobs=(PositionLogprobs(TokenLogprob(3, -0.5, "é"), ()),),
    usage=Usage(2, 0, 1),
    timings=Timings(0.0, 0.1, 0.1, 0.0, 0.0, 0),
)
VALUES = [
    SamplingParams(),
    SamplingParams(stop=("a", "b"), logit_bias={3: 1.5}, seed=7, stop_token_ids=(4,)),
    EngineConfig(block_size=32),
    COMPLETION,
    *FORMATS.values(),
]
ERRORS = [
    errors.InvalidRequestError(FieldViolation("top_p", "is wrong"), FieldViolation("seed", "too")),
    errors.ConfigError("x"),
    errors.CheckpointError("is missing", file="f.gguf", tensor="t"),
    errors.UnsupportedModelError("architectures", ["X"], "llama", file="config.json"),
    errors.QueueFullError(320, 320, 1.5),
    errors.NonFiniteLogitsError("x"),
    errors.BackendUnavailableError("x"),
    errors.OutOfMemoryError("x"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_travel(value: Any) -> None:
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert other == value
        assert hash(other) == hash(value)


@pytest.mark.parametrize("value", [value for value in VALUES if is_dataclass(value) and value not in FORMATS.values()])
def test_values_are_json(value: Any) -> None:
    assert json.loads(json.dumps(asdict(value)))


def test_a_completion_says_in_json_why_it_ended() -> None:
    assert json.loads(json.dumps(asdict(COMPLETION)))["finish_reason"] == "stop_sequence"


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_travel(error: NumbaEngineError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert (str(other), other.args, vars(other)) == (str(error), error.args, vars(error))


def test_all_errors_are_tried() -> None:
    classes = {
        value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, NumbaEngineError)
    }
    assert {type(error) for error in ERRORS} == classes - {NumbaEngineError}


@pytest.mark.parametrize("kind", [client_errors.InferenceError, *client_errors.InferenceError.__subclasses__()])
def test_errors_of_the_client_travel(kind: type[client_errors.InferenceError]) -> None:
    import grpc

    details = client_errors.ErrorDetails(retry_delay_s=2.0, metadata={"a": "b"})
    error = kind(grpc.StatusCode.ABORTED, "why", details, partial_text="so far", token_ids=[1, 2])
    for other in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(other) is kind
        assert (str(other), vars(other)) == (str(error), vars(error))


def _fail() -> None:
    SamplingParams(temperature=-1)


def test_an_error_of_a_worker_process_arrives() -> None:
    with ProcessPoolExecutor(1) as executor, pytest.raises(InvalidRequestError, match="temperature: must be a number"):
        executor.submit(_fail).result(60)


# ---- what is meant is what is taken ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": "zzz END"}, {"stop": ("zzz END",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop_token_ids": np.array([5, 6])}, {"stop_token_ids": (5, 6)}),
        ({"stop_token_ids": [np.int64(5)]}, {"stop_token_ids": (5,)}),
        ({"top_k": np.int32(3), "temperature": np.float32(0.5)}, {"top_k": 3, "temperature": 0.5}),
        ({"seed": np.uint64(2**64 - 1)}, {"seed": 2**64 - 1}),
        ({"logit_bias": {np.int64(7): np.float64(1)}}, {"logit_bias": {7: 1.0}}),
        ({"ignore_eos": np.True_}, {"ignore_eos": True}),
    ],
)  # fmt: skip
def test_numpys_numbers_and_lone_strings_are_taken(given: dict[str, Any], kept: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    assert {name: getattr(params, name) for name in kept} == kept
    assert all(type(getattr(params, name)) is type(value) for name, value in kept.items())
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", b"END"),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop_token_ids", "12"),
        ("stop_token_ids", b"12"),
        ("stop_token_ids", 12),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
        ("top_k", True),
        ("top_k", np.True_),
        ("top_k", 2.0),
        ("temperature", "0.5"),
        ("temperature", np.array([0.5])),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {"1": 2.0}),
        ("ignore_eos", 1),
        ("ignore_eos", "false"),
        ("seed", np.float64(3)),
    ],
)
def test_what_is_of_another_kind_is_refused_and_never_misread(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert [violation.field for violation in caught.value.violations] == [name]


def test_parameters_do_not_change_with_what_they_were_made_of() -> None:
    biases = {3: 1.0}
    params = SamplingParams(logit_bias=biases)
    biases[4] = 2.0
    assert params.logit_bias == {3: 1.0}
    assert numba_engine.SamplingParams is SamplingParams
