"""roofline: the models it takes, what it prints, and what it refuses."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from numba_engine.formats import F16, Format
from numba_engine.profiling.hardware import GPUS

Run = Callable[..., Result]

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


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "llama-3-8b" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA_3_8B))
    return path


def one(result: Result) -> dict[str, Any]:
    assert (result.exit_code, result.stderr) == (0, "")
    (estimate,) = json.loads(result.stdout)["estimates"]
    return estimate


def test_the_articles_example_by_hand(run: Run) -> None:
    result = run("roofline", "--params", "8e9", "--weights", "fp16", "--gpu", "rtx4090")
    assert (result.exit_code, result.stderr) == (0, "")
    (decode,) = (line for line in result.stdout.splitlines() if line.startswith("decode, a token"))
    assert decode.split()[3:] == ["15.87", "ms", "63.0", "15.87", "ms", "96.9", "µs", "MEMORY", "0.61%", "1.22%"]
    assert "ridge: bound by arithmetic from batch 164" in result.stdout
    assert "weights 16.0 GB + KV not counted = 16.0 GB of 25.8 GB: fits" in result.stdout
    assert "fp16 tensor 165.2" in result.stdout
    assert "fp16 shader 82.6" in result.stdout
    assert "together 1.22 J; at TDP for the time of a token 7.14 J" in result.stdout
    assert "NVIDIA Ada GPU Architecture whitepaper" in result.stdout
    assert "…" not in result.stdout, "nothing is cut off where stdout is no terminal"


def test_no_gpu_compares_all_that_can_be(run: Run) -> None:
    result = run("roofline", "--params", "70B", "--tp", "8")
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.split()[:1] and line[0] != " "}
    assert set(GPUS) <= set(rows)
    assert rows["h200"][1:5] == ["4,800", "3.65", "274.3", "MEMORY"]  # 140 GB / 8 / 4.8 TB/s
    assert "…" not in result.stdout


def test_several_gpus_are_compared(run: Run) -> None:
    estimates = json.loads(run("roofline", "--params", "8B", "--gpu", "h100", "--gpu", "RTX 4090", "--json").stdout)
    assert [estimate["gpu"]["key"] for estimate in estimates["estimates"]] == ["h100-sxm", "rtx4090"]


@pytest.mark.parametrize("how", ["--config file", "file", "directory"])
def test_a_config_without_weights_gives_the_exact_shape(run: Run, config: Path, how: str) -> None:
    model = {"--config file": ["--config", str(config)], "file": [str(config)], "directory": [str(config.parent)]}[how]
    estimate = one(run("roofline", *model, "--gpu", "rtx4090", "--context", "8192", "--json"))
    assert (estimate["model"], estimate["num_parameters"]) == ("llama-3-8b", 8_030_261_248)
    assert estimate["memory"]["kv_bytes"] == 1 << 30


def test_a_checkpoint_is_taken_as_it_is_stored(run: Run, tiny_gguf: Path) -> None:
    stored = one(run("roofline", str(tiny_gguf), "--gpu", "l4", "--json"))
    assert stored["weight_format"] == "Q8_0"
    as_fp16 = one(run("roofline", str(tiny_gguf), "--gpu", "l4", "--weights", "fp16", "--json"))
    assert as_fp16["weight_format"] == "fp16"
    assert as_fp16["memory"]["weight_bytes"] > stored["memory"]["weight_bytes"] * 1.5


def test_all_options_reach_the_planner(run: Run, config: Path) -> None:
    options = ["--weights", "fp8", "--kv", "fp8", "-b", "16", "-c", "2048", "--tp", "4", "--target", "50"]
    drafts = ["--speculative-acceptance", "0.7", "--draft-len", "3", "--draft-cost", "0.02"]
    estimate = one(run("roofline", "--config", str(config), "--gpu", "h100", *options, *drafts, "--json"))
    workload = estimate["workload"]
    assert (workload["weights"]["name"], workload["kv"]["name"]) == ("fp8", "fp8")
    assert (workload["batch"], workload["context"], workload["tp"]) == (16, 2048, 4)
    assert workload["speculation"]["tokens_per_pass"] == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    assert estimate["target"]["tokens_per_s"] == 50
    text = run("roofline", "--config", str(config), "--gpu", "h100", *options, *drafts).stdout
    assert "target: 50 tok/s a sequence needs" in text
    assert "NVIDIA NCCL" in text


def test_a_shape_by_hand_counts_the_kv_cache(run: Run) -> None:
    shape = ["--num-layers", "32", "--hidden-size", "4096", "--num-kv-heads", "8", "--head-dim", "128"]
    estimate = one(run("roofline", "--params", "8.03e9", *shape, "--gpu", "rtx4090", "--context", "8192", "--json"))
    assert estimate["memory"]["kv_bytes"] == 1 << 30
    assert estimate["notes"] == []


def test_this_machine_is_measured(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured:
        device_name = "EPYC"
        peak: tuple[float, str] | None = None

        def read_bandwidth_gbps(self) -> float:
            return 35.0

        def peak_gflops(self, format: Format) -> tuple[float, str] | None:
            assert format is F16, "weights are fp16"
            return self.peak

    module = importlib.import_module("numba_engine.cli.roofline")  # the package has the command by that name
    monkeypatch.setattr(module, "create_backend", lambda config: Measured())
    result = run("roofline", "--params", "135M", "--gpu", "this-machine")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "EPYC: 35 GB/s by measurement" in result.stdout
    [prefill] = [line.split() for line in result.stdout.splitlines() if line.startswith("prefill, all prompts")]
    assert prefill == ["prefill,", "all", "prompts", "not", "known"]
    assert "7.71 ms" in result.stdout  # 270 MB at 35 GB/s
    Measured.peak = (270.0, "float32 fma (avx2)")
    known = run("roofline", "--params", "135M", "--gpu", "this-machine").stdout
    assert "float32 fma (avx2) 0.27, measured" in known
    [prefill] = [line.split() for line in known.splitlines() if line.startswith("prefill, all prompts")]
    assert prefill[3:6] == ["1.02", "s", "1,000"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of MODEL, --params and --config"),
        (["m", "--params", "8e9"], "give one of MODEL, --params and --config"),
        (["--params", "-3"], "'-3' is out of range; 1 to 1e15 parameters are allowed"),
        (["--params", "0"], "out of range"),
        (["--params", "nan"], "'nan' is not a number of parameters such as 8e9, 8B or 135M"),
        (["--params", "1e999"], "out of range"),
        (["--params", "8e9", "--gpu", "gtx970"], "no GPU 'gtx970' in the table; known are rtx3090, rtx4090"),
        (["--params", "8e9", "--weights", "q9"], "weights must be one of fp32, fp16"),
        (["--params", "8e9", "--kv", "q9"], "kv must be one of fp32, fp16"),
        (["--params", "8e9", "--batch", "0"], "batch must be 1 to 65536, got 0"),
        (["--params", "8e9", "--context", "-1"], "context must be 1 to"),
        (["--params", "8e9", "--tp", "64"], "the most is 8"),
        (["--params", "8e9", "--tp", "16", "--gpu", "h100"], "tp must be at most 8 on NVIDIA H100 SXM, got 16"),
        (["--params", "8e9", "--num-layers", "3"], "missing: --hidden-size, --num-kv-heads, --head-dim"),
        (["--params", "8e9", "--draft-len", "3"], "go with --speculative-acceptance"),
        (["--params", "8e9", "--speculative-acceptance", "1.5"], "the acceptance rate must be 0 to 1, got 1.5"),
        (["--params", "8e9", "--target", "-1", "--gpu", "l4"], "the target must be a positive number of tok/s"),
        (["--params", "8e9", "--target", "1e300"], "a positive number of tok/s up to 1,000,000, got 1e+300"),
        (["--params", "1e15", "--target", "1e6", "--gpu", "l4"], "the target must be lower: 1e+06 tok/s a sequence"),
        (["m.json", "--num-layers", "3"], "go with --params"),
        (["/nowhere/config.json"], "/nowhere/config.json: cannot be read"),
        (["/nowhere"], "no such file or directory"),
    ],
)
def test_absurd_questions_are_errors_that_say_what_is_allowed(run: Run, arguments: list[str], message: str) -> None:
    result = run("roofline", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())
    assert "bug" not in result.stderr


def test_an_architecture_the_engine_does_not_have_points_to_params(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "gemma.json"
    path.write_text(json.dumps(LLAMA_3_8B | {"architectures": ["GemmaForCausalLM"]}))
    result = run("roofline", str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {path}: architectures = 'GemmaForCausalLM' is not supported")
    assert "--params" in result.stderr


def test_help_names_the_command_and_its_gpus(run: Run) -> None:
    assert "\n  roofline " in run("--help").stdout
    assert "mi325x" in run("roofline", "--help").stdout
