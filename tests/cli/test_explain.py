"""explain on a real engine with a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from numba_engine import LLM, EngineConfig
from numba_engine.cli import cli
from numba_engine.profiling.explain import stages

pytestmark = pytest.mark.kernels

ENGINE = ("--backend", "cpu", "--threads", "2", "--num-kv-blocks", "64", "--repetitions", "2")


def explain(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["explain", str(model), *ENGINE, *arguments])


def explained(model: Path, *arguments: str) -> dict[str, Any]:
    result = explain(model, "--json", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    said: dict[str, Any] = json.loads(result.stdout)
    return said


@pytest.fixture(scope="module")
def llm(tiny_gguf: Path) -> LLM:
    return LLM(str(tiny_gguf), EngineConfig(backend="cpu", num_threads=2, num_kv_blocks=64))


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ((), {}),
        (("--temperature", "0"), {"temperature": 0.0}),
        (("--seed", "17", "--temperature", "1.7", "--top-k", "0", "--top-p", "1", "--min-p", "0"),
         {"seed": 17, "temperature": 1.7, "top_p": 1.0, "min_p": 0.0, "top_k": 0}),
        (("--seed", "18446744073709551615", "--top-k", "9", "--repetition-penalty", "1.5"),
         {"seed": 2**64 - 1, "top_k": 9, "repetition_penalty": 1.5}),
    ],
)  # fmt: skip
def test_the_token_explained_is_the_engines(
    tiny_gguf: Path, llm: LLM, arguments: tuple[str, ...], settings: dict[str, Any]
) -> None:
    params = replace(llm.default_sampling, **{"seed": 0, "max_tokens": 2, "ignore_eos": True, **settings})
    expected = llm.generate(["the quick brown"], params)[0]
    walk = explained(tiny_gguf, "--prompt", "the quick brown", *arguments)["walk"]
    assert [token["token_id"] for token in walk["prompt_tokens"]] == list(expected.prompt_token_ids)
    assert "".join(token["text"] for token in walk["prompt_tokens"]) == "the quick brown"
    assert (walk["first_token"]["token_id"], walk["token"]["token_id"]) == expected.token_ids
    assert walk["text"] == expected.text
    choice = walk["choice"]
    assert choice["token_id"] == choice["engine_token_id"] == expected.token_ids[1]
    assert choice["seed"] == params.seed
    assert choice["output_index"] == 1
    if params.temperature:
        assert choice["race"][0]["token_id"] == expected.token_ids[1]
        top_k = next(stage for stage in choice["stages"] if stage["name"] == "top-k")
        assert top_k["num_left"] == (params.top_k or llm.model_info.vocab_size)


def test_costs_follow_the_text(tiny_gguf: Path, llm: LLM) -> None:
    said = explained(tiny_gguf, "--prompt", "the quick brown", "--seed", "3")
    walk = said["walk"]
    num_prompt = len(llm.tokenize("the quick brown"))
    tokens = [walk[name]["num_tokens"] for name in ("prefill", "decode", "recompute", "wide")]
    assert tokens == [num_prompt, 1, num_prompt + 1, 128]
    assert [walk[name]["num_steps"] for name in ("prefill", "decode", "recompute", "wide")] == [1, 1, 1, 1]
    assert walk["embedding"]["row_bytes"] == 64 // 32 * 34, "of the table that is stored, not of a padded one"
    row_bytes = walk["embedding"]["phase"]["one"]["weight_bytes"]
    # Weights are read once however many tokens there are; only the embedding has a row for each.
    assert walk["recompute"]["weight_bytes"] == walk["decode"]["weight_bytes"] + num_prompt * row_bytes
    assert walk["wide"]["weight_bytes"] == walk["decode"]["weight_bytes"] + 127 * row_bytes
    assert walk["decode"]["kv_bytes"] == (num_prompt + 2) * llm.model_info.kv_bytes_per_token  # all read, one written
    assert walk["budget"]["read_bandwidth_gbps"] > 0
    assert walk["budget"]["unwatched_time_s"] > 0
    assert walk["near"]["repeated_time_s"] > 0
    assert len(said["answers"]) == 5
    assert all(answer["figures"] for answer in said["answers"])


def test_it_reads_in_order(tiny_gguf: Path) -> None:
    result = explain(tiny_gguf, "--prompt", "the [red]quick[/red] fox")
    assert (result.exit_code, result.stderr) == (0, "")
    headings = ("1  prompt", "2  prefill", "3  token id", "4  through 2 layers", "5  final norm", "6  logits")
    headings += ("7  token", "8  the time budget", "9  five questions")
    places = [result.stdout.index(f"\n{heading}") for heading in headings]
    assert places == sorted(places)
    assert "residual [1, 64] × [128, 64] Q8_0 → qkv [1, 128]" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 110


def test_textbook_ops_one_by_one(tiny_gguf: Path) -> None:
    walk = explained(tiny_gguf, "--no-fusion")["walk"]
    assert [phase["name"] for phase in walk["layer_phases"]] == [
        "rms_norm", "linear qkv_proj", "rope", "store_kv", "attention", "linear_add o_proj",
        "rms_norm", "linear gate_up_proj", "gated_activation", "linear_add down_proj",
    ]  # fmt: skip
    assert [phase["name"] for phase in walk["head_phases"]] == ["gather_rows", "rms_norm", "linear lm_head"]
    assert "linear lm_head" in explain(tiny_gguf, "--no-fusion").stdout


def test_a_prompt_of_several_steps(tiny_gguf: Path) -> None:
    arguments = ("--prompt", "the quick brown fox", "--max-num-batched-tokens", "4")
    prefill = explained(tiny_gguf, *arguments)["walk"]["prefill"]
    assert prefill["num_steps"] == -(-prefill["num_tokens"] // 4) > 1
    assert f"in {prefill['num_steps']} steps" in explain(tiny_gguf, *arguments).stdout


def test_a_chat_is_explained_in_its_template(tiny_gguf: Path) -> None:
    walk = explained(tiny_gguf, "--chat", "hello")["walk"]
    assert walk["prompt"] == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_the_context_must_have_room_for_two_more(tiny_gguf: Path, llm: LLM) -> None:
    prompt = "the quick brown fox " * 8
    length = len(llm.tokenize(prompt))
    fits = explain(tiny_gguf, "--prompt", prompt, "--max-model-len", str(length + 2))
    assert (fits.exit_code, fits.stderr) == (0, "")
    result = explain(tiny_gguf, "--prompt", prompt, "--max-model-len", str(length + 1))
    assert result.exit_code == 2
    assert f"prompt: is {length} tokens; with the two that follow they must fit into {length + 1}" in result.stderr


def test_a_bad_parameter_is_refused_before_loading() -> None:
    result = CliRunner().invoke(cli, ["explain", "/no/such/model.gguf", "--top-p", "7"])
    assert result.exit_code == 2
    assert "top_p: must be a number in (0, 1], got 7.0" in result.stderr


def test_a_draw_that_is_not_the_engines_is_an_exit_code(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stages.philox_uniforms
    monkeypatch.setattr(stages, "philox_uniforms", lambda count, seed, index: 1 - real(count, seed, index))
    arguments = ("--temperature", "100", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    result = explain(tiny_gguf, "--json", *arguments)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["walk"]["choice"]["agrees"] is False
