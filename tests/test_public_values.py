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
from numba_engine import LLM, ConfigError, EngineConfig, InvalidRequestError, SamplingParams, errors
from numba_engine.errors import FieldViolation, NumbaEngineError
from numba_engine.formats import FORMATS
from numba_engine.outputs import Completion, FinishReason, PositionLogprobs, Timings, TokenLogprob, Usage
from numba_engine_client import errors as client_errors
from numba_engine_client import requests as client_requests
from tests.tiny_models import TinyModel, write_hf

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


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(write_hf(tmp_path_factory.mktemp("m") / "m", TinyModel(num_layers=1))), EngineConfig(num_threads=1))


ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("prompts", "meant"),
    [
        (np.array([5, 6]), [(5, 6)]),
        (np.array([[5, 6], [7, 8]], np.uint16), [(5, 6), (7, 8)]),
        ([np.array([5, 6]), (7,)], [(5, 6), (7,)]),
        ([np.int64(5), 6], [(5, 6)]),
        ((np.array([5], np.int32),), [(5,)]),
        ((ids for ids in ([5], [6])), [(5,), (6,)]),
        ([range(5, 7)], [(5, 6)]),
        ([], []),
    ],
)
def test_prompts_of_numpy_and_of_any_order(llm: LLM, prompts: Any, meant: list[tuple[int, ...]]) -> None:
    completions = llm.generate(prompts, ONE)
    assert [completion.prompt_token_ids for completion in completions] == meant
    assert all(type(i) is int for completion in completions for i in completion.prompt_token_ids)


@pytest.mark.kernels
def test_arrays_of_texts_and_of_parameters(llm: LLM) -> None:
    both = llm.generate(np.array(["the", "fox"]), np.array([ONE, ONE]))
    assert [c.prompt_token_ids for c in both] == [c.prompt_token_ids for c in llm.generate(["the", "fox"], ONE)]


@pytest.mark.kernels
@pytest.mark.parametrize(
    "prompts",
    [
        b"hi", [b"hi"], bytearray(b"hi"), {"hi": 1}, {5, 6}, [{5, 6}], None, 5, [5, "hi"], [[[5]]], [True, False],
        [5.0, 6.0], np.array([5.0]), [None], ["hi", 5], [np.array([True])],
    ],
    ids=repr,
)  # fmt: skip
def test_prompts_of_another_kind_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.generate(prompts, ONE)
    assert not llm.has_unfinished


@pytest.mark.kernels
@pytest.mark.parametrize("params", [{"temperature": 0}, SamplingParams, "greedy", [{"temperature": 0}], 0], ids=repr)
def test_parameters_of_another_kind_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="params"):
        llm.generate(["hi"], params)


@pytest.mark.kernels
def test_texts_and_ids_of_another_kind_are_refused(llm: LLM) -> None:
    assert llm.detokenize(np.array([60, 61])) == llm.detokenize(i for i in (60, 61)) == llm.detokenize([60, 61]) != ""  # type: ignore[arg-type]
    for ids in (b"12", "12", 12, [True], [60.0], {60}, None, np.array([[60]])):
        with pytest.raises(InvalidRequestError, match="token_ids"):
            llm.detokenize(ids)  # type: ignore[arg-type]
    for text in (b"hi", ["hi"], None, 5):
        with pytest.raises(InvalidRequestError, match="must be text"):
            llm.tokenize(text)  # type: ignore[arg-type]
    message = {"role": "user", "content": "hi"}
    for messages in ("hi", message, None, iter([message]), [["user", "hi"]], b"hi"):
        with pytest.raises(InvalidRequestError, match="messages"):
            llm.apply_chat_template(messages)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="request_id"):
        llm.add_request(5, "hi", ONE)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_threads", True),
        ("num_threads", 1.0),
        ("block_size", 16.0),
        ("max_num_seqs", True),
        ("max_num_seqs", None),
        ("max_model_len", "64"),
        ("prefix_caching", "false"),
        ("prefix_caching", 1),
        ("fusion", None),
        ("backend", b"cpu"),
    ],
)
def test_settings_of_another_kind_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        EngineConfig(**{name: value})


def test_settings_of_numpy_are_pythons_own() -> None:
    config = EngineConfig(block_size=np.int64(32), fusion=np.False_, num_kv_blocks=np.uint8(9))  # type: ignore[arg-type]
    assert (config.block_size, config.fusion, config.num_kv_blocks) == (32, False, 9)
    assert json.loads(json.dumps(asdict(config)))["num_kv_blocks"] == 9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", b"END"),
        ("stop_token_ids", b"12"),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [1.0]),
        ("top_k", True),
        ("max_tokens", 2.5),
        ("temperature", True),
        ("ignore_eos", 1),
        ("ignore_eos", "false"),
    ],
)
def test_the_client_refuses_them_too(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        client_requests.sampling_params({name: value})


def test_the_client_takes_numpys_numbers() -> None:
    message = client_requests.sampling_params(
        {"stop_token_ids": np.array([5, 6]), "top_k": np.int64(3), "temperature": np.float32(0.5), "stop": "END"}
    )
    assert (list(message.stop_token_ids), message.top_k, message.temperature, list(message.stop)) == (
        [5, 6], 3, 0.5, ["END"],
    )  # fmt: skip
    assert list(client_requests.input_fields(None, np.array([7, 8]), None)["token_ids"].ids) == [7, 8]  # type: ignore[arg-type]
    for ids in (b"hi", "12", [True], [1.0]):
        with pytest.raises(TypeError):
            client_requests.input_fields(None, ids, None)  # type: ignore[arg-type]
