"""The planner by names and numbers: what the command line says, and every wrong argument named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from numba_engine.errors import InvalidRequestError
from numba_engine.profiling.hardware import GPUS, measured_machine
from numba_engine.profiling.planner import estimate_throughput, model_of_config, model_of_size

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SHAPE = {"num_layers": 32, "hidden_size": 4096, "num_kv_heads": 8, "head_dim": 128}


def fields_of(call: Callable[[], Any]) -> set[str]:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    return {violation.field for violation in caught.value.violations}


def test_the_articles_example() -> None:
    [one] = estimate_throughput(model_of_size(8 * 10**9), ["rtx4090"])
    assert one.decode.time_per_token_s == pytest.approx(16e9 / 1008e9)
    assert (one.weight_format, one.workload.kv.name, one.workload.context) == ("fp16", "fp16", 1024)


def test_no_gpu_is_all_that_can_be_joined() -> None:
    assert [one.gpu.key for one in estimate_throughput(model_of_size(10**9))] == list(GPUS)
    joined = estimate_throughput(model_of_size(10**9), tensor_parallel=8)
    assert all(one.gpu.max_gpus >= 8 for one in joined)


def test_a_config_and_its_sizes() -> None:
    model = model_of_config(json.dumps(LLAMA_3_8B))
    assert model.num_parameters == 8_030_261_248
    [one] = estimate_throughput(model, ["h200"], weight_format="Q4_0", kv_format="fp8", batch=4, context=8192)
    assert one.memory.kv_bytes == 4 * 8192 * 2 * 32 * 8 * 128
    [by_hand] = estimate_throughput(
        model_of_size(8_030_261_248, **SHAPE), ["h200"], weight_format="q4_0", kv_format="fp8", batch=4, context=8192
    )
    assert by_hand.memory.kv_bytes == one.memory.kv_bytes


def test_speculation_and_target() -> None:
    model = model_of_size(70 * 10**9)
    [one] = estimate_throughput(model, ["h200"], acceptance=0.5, draft_len=1, draft_cost=0.0, target_tokens_per_s=20)
    [plain] = estimate_throughput(model, ["h200"])
    assert one.decode.tokens_per_s == pytest.approx(1.5 * plain.decode.tokens_per_s)
    assert one.target is not None
    assert one.target.bandwidth_gbps == pytest.approx(140 * 20 / 1.5)


def test_this_machine() -> None:
    machine = measured_machine("a desk", 50.0, 2**34)
    [one] = estimate_throughput(model_of_size(10**9), ["This-Machine"], this_machine=machine)
    assert one.decode.tokens_per_s == pytest.approx(25)
    assert fields_of(lambda: estimate_throughput(model_of_size(10**9), ["this-machine"])) == {"gpus[0]"}


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"batch": 0, "context": 2**23, "tensor_parallel": 2000}, {"batch", "context", "tensor_parallel"}),
        ({"weight_format": "q3", "kv_format": "int4"}, {"weight_format", "kv_format"}),
        ({"gpus": ["h100", "h300", ""]}, {"gpus[1]", "gpus[2]"}),
        ({"gpus": ["h100"] * 65}, {"gpus"}),
        ({"gpus": ["rtx4090"], "tensor_parallel": 64}, {"tensor_parallel"}),
        ({"tensor_parallel": 3}, {"tensor_parallel"}),  # 8 KV heads
        ({"tensor_parallel": 1024}, {"tensor_parallel"}),  # no GPU is joined with so many
        ({"acceptance": 1.5, "draft_len": 0}, {"speculation.acceptance", "speculation.draft_len"}),
        ({"acceptance": float("nan"), "draft_cost": 2}, {"speculation.acceptance", "speculation.draft_cost"}),
        ({"draft_len": 4}, {"speculation.acceptance"}),
        ({"target_tokens_per_s": float("inf"), "batch": -1}, {"target_tokens_per_s", "batch"}),
        ({"target_tokens_per_s": 1e15}, {"target_tokens_per_s"}),
        ({"target_tokens_per_s": 1e6, "batch": 65536, "context": 2**22}, {"target_tokens_per_s"}),  # too many GPUs
    ],
)
def test_all_wrong_arguments_are_named(arguments: dict[str, Any], fields: set[str]) -> None:
    assert fields_of(lambda: estimate_throughput(model_of_size(8 * 10**9, **SHAPE), **arguments)) == fields


def test_a_description_does_not_name_its_field_again() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        estimate_throughput(model_of_size(10**9), ["x1"], batch=0, acceptance=2.0)
    assert [violation.description for violation in caught.value.violations[:2]] == [
        "must be 1 to 65536, got 0",
        "must be 0 to 1, got 2.0",
    ]
    assert caught.value.violations[2].description.startswith("no GPU 'x1' in the table; known are rtx3090, ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{" * 100_000,
        '{"a": 1, "a": 1}',
        "\ud800",
        json.dumps(LLAMA_3_8B | {"num_hidden_layers": 10**9}),
        json.dumps(LLAMA_3_8B | {"architectures": ["GemmaForCausalLM"]}),
    ],
)
def test_a_config_that_is_none(text: str) -> None:
    assert fields_of(lambda: model_of_config(text)) == {"config_json"}


@pytest.mark.parametrize(
    ("changes", "description"),
    [
        ({"hidden_size": -4096}, "hidden_size must be an integer from 1 to 1048576, got -4096"),
        ({"sliding_window": -5}, "sliding_window must be an integer from 0 to 2097152, got -5"),
        ({"model_type": ["x"]}, "model_type must be a name, got ['x']"),
    ],
)
def test_what_is_wrong_in_a_config_names_its_key(changes: dict[str, Any], description: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        model_of_config(json.dumps(LLAMA_3_8B | changes))
    assert [(v.field, v.description) for v in caught.value.violations] == [("config_json", description)]


def test_a_config_that_is_no_json_has_no_file_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"^config_json: is not valid JSON"):
        model_of_config("{")


def test_sizes_that_are_none() -> None:
    assert fields_of(lambda: model_of_size(0)) == {"num_parameters"}
    assert fields_of(lambda: model_of_size(10**16, num_layers=0)) == {
        "num_parameters",
        "num_layers",
        "hidden_size",
        "num_kv_heads",
        "head_dim",
    }
