"""The commands on a real engine: a tiny model loads, talks, is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from numba_engine import LLM, EngineConfig
from numba_engine.cli import cli

pytestmark = pytest.mark.kernels

ENGINE = ("--backend", "cpu", "--threads", "2", "--num-kv-blocks", "64", "--activation-dtype", "float32")


@pytest.fixture(scope="module")
def llm(tiny_gguf: Path) -> LLM:
    return LLM(str(tiny_gguf), EngineConfig(backend="cpu", num_threads=2, num_kv_blocks=64, activation_dtype="float32"))


def test_generate_says_what_the_library_says(llm: LLM, tiny_gguf: Path) -> None:
    params = replace(llm.default_sampling, temperature=0.8, seed=7, max_tokens=12, logprobs=2, ignore_eos=True)
    expected = llm.generate(["the quick"], params)[0]
    sampling = ("--temperature", "0.8", "--seed", "7", "--max-tokens", "12", "--ignore-eos")
    arguments = ["generate", str(tiny_gguf), "--prompt", "the quick", *ENGINE, *sampling]
    as_json = CliRunner().invoke(cli, [*arguments, "--json", "--logprobs", "2"])
    assert as_json.exit_code == 0, as_json.stderr
    generation = json.loads(as_json.stdout)
    assert generation["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert generation["token_ids"] == list(expected.token_ids)
    assert (generation["text"], generation["finish_reason"]) == (expected.text, "max_tokens")
    assert [p["token_id"] for p in generation["logprobs"]] == generation["token_ids"]
    assert all(len(p["top"]) == 2 for p in generation["logprobs"])
    streamed = CliRunner().invoke(cli, arguments)
    assert streamed.stdout_bytes == expected.text.encode()


def test_profile_accounts_for_the_whole_step(tiny_gguf: Path) -> None:
    result = CliRunner().invoke(cli, ["profile", str(tiny_gguf), "-n", "4", "--no-fusion", "--json", *ENGINE])
    assert result.exit_code == 0, result.stderr
    profile = json.loads(result.stdout)
    assert [step["num_decode_tokens"] for step in profile["steps"]] == [0, 1, 1, 1]
    for step in profile["steps"]:
        assert sum(op["time_s"] for op in step["ops"]) <= step["time_s"]
        assert {"embedding", "attention", "linear", "sample"} <= {op["name"] for op in step["ops"]}
    weight_bytes = {sum(op["weight_bytes"] for op in step["ops"]) for step in profile["steps"][1:]}
    assert len(weight_bytes) == 1, "every decode step reads the same"
    embedding_bytes = 331 * 64 // 32 * 34
    all_but_embedding = profile["model"]["weight_bytes"] - embedding_bytes
    assert weight_bytes.pop() == pytest.approx(all_but_embedding, rel=0.02)


def test_synthetic_sequences_decode_together(tiny_gguf: Path) -> None:
    """The first decode already while the last prompts are computed; those steps are in no decode figure."""
    sizes = ("--synthetic", "4x40", "-n", "9", "--warm-up", "3", "--max-num-batched-tokens", "16")
    result = CliRunner().invoke(cli, ["profile", str(tiny_gguf), *sizes, "--json", *ENGINE])
    assert result.exit_code == 0, result.stderr
    profile = json.loads(result.stdout)
    steps, summary = profile["steps"], profile["summary"]
    assert any(step["num_decode_tokens"] == 3 for step in steps[:-9]), "three waited for the last"
    assert [(step["num_seqs"], step["num_prefill_tokens"]) for step in steps[-9:]] == [(4, 0)] * 9
    assert all(step["num_prefill_tokens"] for step in steps[:-9])
    assert (summary["num_decode_steps"], summary["num_unprofiled_steps"]) == (7, 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("17x8", "-n", "2", "--max-num-batched-tokens", "16"), "max_num_batched_tokens is 16, but 17 sequences"),
        (("9x100", "-n", "12"), "the KV cache has 64 blocks, but 72 are needed"),
    ],
)
def test_synthetic_sequences_that_cannot_decode_together(tiny_gguf: Path, sizes: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(cli, ["profile", str(tiny_gguf), *ENGINE, "--synthetic", *sizes])
    assert result.exit_code == 2
    assert message in result.stderr


def test_bench_rows(tiny_gguf: Path) -> None:
    arguments = ["bench", str(tiny_gguf), "-p", "32", "-n", "8", "-r", "2", "--json", *ENGINE]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [(row["name"], row["num_tokens"]) for row in rows] == [("pp32", 32), ("tg8", 8)]
    assert all(row["tokens_per_s"] > 0 for row in rows)


def test_missing_model_is_one_line() -> None:
    result = CliRunner().invoke(cli, ["generate", "/no/such/model.gguf", "--prompt", "p"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert "/no/such/model.gguf" in result.stderr
    assert "no such file" in result.stderr
    assert result.stderr.count("\n") == 1
