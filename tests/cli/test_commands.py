"""profile, bench, model-info, fetch-demo, and what becomes of errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from numba_engine.checkpoint import demo
from numba_engine.cli import loading
from numba_engine.errors import CheckpointError
from numba_engine.sampling_params import SamplingParams
from tests.cli.fake_llm import FakeLLM

Run = Callable[..., Result]


def test_profile_prints_model_ops_and_limit(run: Run, llms: list[FakeLLM]) -> None:
    result = run("profile", "m", "--prompt", "ab", "--max-tokens", "3", "--no-fusion")
    assert (result.exit_code, result.stderr) == (0, "")
    first = result.stdout.splitlines()[0]
    assert first == (
        "tiny (llama, 134.5 M parameters, 98.0 MB as Q4_1, Q8_0) on cpu: EPYC; int8 activations, float16 KV cache"
    )
    assert "linear" in result.stdout
    assert "250.0 tok/s" in result.stdout
    assert "43%" in result.stdout
    assert llms[0].params == [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)]
    assert (llms[0].session.fusion, llms[0].prompts) == (False, [[97, 98]])


def test_profile_json(run: Run, llms: list[FakeLLM]) -> None:
    result = run("profile", "m", "--max-tokens", "3", "--json")
    profile = json.loads(result.stdout)
    assert profile["model"]["name"] == "tiny"
    assert [step["index"] for step in profile["steps"]] == [0, 1, 2]
    assert profile["summary"]["read_bandwidth_gbps"] == 35.0
    assert llms[0].session.fusion is True
    assert llms[0].prompts != [[]], "there is a prompt where none is given"


def test_profile_of_made_up_prompts_after_a_warm_up(run: Run, llms: list[FakeLLM]) -> None:
    result = run("profile", "m", "--synthetic", "3x7", "-n", "2", "--warm-up", "1", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    [llm] = llms
    assert [len(prompt) for prompt in llm.prompts] == [7] * 6, "three to warm up, three to measure"
    assert len({tuple(prompt) for prompt in llm.prompts}) == 6, "none is found in the prefix cache"
    assert {params.max_tokens for params in llm.params} == {None}, "they end together"
    steps = json.loads(result.stdout)["steps"]
    assert [step["index"] for step in steps] == [0, 1, 2], "a prompt and two tokens: the warm-up is not reported"
    assert llm.session.decode_seqs == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--synthetic", "3x7", "--prompt", "p"], "--synthetic stands instead of a prompt"),
        (["--synthetic", "3"], "'3' is no number of sequences and tokens such as 4x512"),
        (["--synthetic", "0x9"], "'0x9' is no number"),
        (["--synthetic", "9x9"], "max_num_seqs is 8, but 9 sequences are to run at once"),
        (["--synthetic", "1x2017"], "max_model_len is 2048, but 2050 tokens are needed"),
    ],
)
def test_profile_of_made_up_prompts_that_cannot_be(run: Run, arguments: list[str], message: str) -> None:
    result = run("profile", "m", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_bench_prints_a_markdown_table(run: Run) -> None:
    result = run("bench", "m", "-p", "4", "-n", "3", "-r", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    head, rule, pp, tg = ([cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines())
    assert head == ["model", "size", "params", "backend", "threads", "test", "t/s", "GB/s", "of read bandwidth"]
    assert all(set(cell) <= {"-", ":"} for cell in rule)
    assert pp[:6] == ["llama tiny Q4_1", "93.46 MiB", "134.52 M", "cpu", "2", "pp4"]
    assert (tg[5], tg[8].endswith("% of 35.0")) == ("tg3", True)
    assert "±" in tg[6]
    assert len({len(line) for line in result.stdout.splitlines()}) == 1, "columns align"


def test_bench_json(run: Run) -> None:
    result = run("bench", "m", "-p", "0", "-n", "3", "-r", "1", "-b", "1", "-d", "2", "--json")
    bench = json.loads(result.stdout)
    assert [row["name"] for row in bench["rows"]] == ["tg3 @ d2"]
    assert bench["model"]["num_threads"] == 2


def test_bench_that_does_not_fit(run: Run) -> None:
    result = run("bench", "m", "-p", "5000", "-n", "0")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: max_model_len is 2048")


def test_model_info(run: Run) -> None:
    info = json.loads(run("model-info", "m", "--json").stdout)
    assert (info["weight_formats"], info["eos_token_ids"]) == (["Q4_1", "Q8_0"], [2, 5])
    rows = dict(line.split(maxsplit=1) for line in run("model-info", "m").stdout.splitlines())
    assert rows["weight_bytes"].strip() == "98,000,000 (98.0 MB)"
    assert rows["eos_token_ids"].strip() == "2, 5"
    assert rows["has_chat_template"].strip() == "True"


def test_fetch_demo_prints_the_path(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "fetch_demo", lambda progress: Path("/cache/demo.gguf"))
    result = run("fetch-demo")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "/cache/demo.gguf\n", "")


def test_kernels_are_compiled_before_anything_is_asked(run: Run, llms: list[FakeLLM]) -> None:
    run("generate", "m", "--prompt", "p")
    assert llms[0].warmed_up


def _failing(error: Exception) -> Any:
    def make(*args: Any, **more: Any) -> FakeLLM:
        raise error

    return make


def test_error_of_the_engine_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LLM", _failing(CheckpointError("is truncated", file="m.gguf", tensor="blk.0")))
    result = run("generate", "m.gguf", "--prompt", "p")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "Error: m.gguf: tensor 'blk.0': is truncated\n"
    assert "Traceback" in run("--debug", "generate", "m.gguf", "--prompt", "p").stderr


def test_error_of_the_system_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LLM", _failing(PermissionError(13, "Permission denied", "m.gguf")))
    result = run("generate", "m.gguf", "--prompt", "p")
    assert (result.exit_code, result.stderr) == (2, "Error: [Errno 13] Permission denied: 'm.gguf'\n")


def test_anything_else_is_a_bug_and_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LLM", _failing(IndexError("list index out of range\nmore")))
    result = run("generate", "m.gguf", "--prompt", "p")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: this is a bug: IndexError: list index out of range; numba-engine --debug … shows where\n"
    )
    assert "Traceback" in run("generate", "m", "--prompt", "p", env={"NUMBA_ENGINE_DEBUG": "1"}).stderr


def test_help_names_every_command(run: Run) -> None:
    out = run("--help").stdout
    for command in ("generate", "profile", "bench", "model-info", "fetch-demo"):
        assert f"\n  {command} " in out
