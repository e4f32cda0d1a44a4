"""``numba-engine generate``: stdout, stderr, exit code, and what reaches the engine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from numba_engine.sampling_params import SamplingParams
from tests.cli.fake_llm import FakeLLM

Run = Callable[..., Result]


def test_stdout_has_the_text_and_nothing_else(run: Run) -> None:
    result = run("generate", "m", "--prompt", "The capital")
    assert (result.exit_code, result.stdout_bytes) == (0, "Paris 🎉\n".encode())
    assert result.stderr == (
        "prompt: 11 tokens (1 cached), first token after 0.050 s; output: 3 tokens, 100.0 tok/s; "
        "finished by max_tokens\n"
    )


def test_quiet(run: Run) -> None:
    result = run("generate", "m", "--prompt", "p", "--quiet")
    assert (result.stdout, result.stderr) == ("Paris 🎉\n", "")


def test_json_is_one_object(run: Run) -> None:
    result = run("generate", "m", "--prompt", "ab", "--json", "-q")
    assert json.loads(result.stdout) == {
        "prompt_token_ids": [97, 98],
        "token_ids": [10, 11, 12],
        "text": "Paris 🎉\n",
        "finish_reason": "max_tokens",
        "stop_sequence": None,
        "stop_token_id": None,
        "logprobs": None,
        "usage": {"prompt_tokens": 2, "cached_prompt_tokens": 1, "completion_tokens": 3},
        "timings": {
            "queue_s": 0.0,
            "ttft_s": 0.05,
            "prefill_s": 0.05,
            "decode_s": 0.02,
            "mean_inter_token_s": 0.01,
            "num_preemptions": 0,
        },
    }


def test_logprobs_in_json(run: Run) -> None:
    result = run("generate", "m", "--prompt", "ab", "--json", "--logprobs", "1")
    token = {"token_id": 12, "logprob": -0.25, "text": "is 🎉\n"}
    assert json.loads(result.stdout)["logprobs"][2] == {**token, "top": [token]}
    refused = run("generate", "m", "--prompt", "ab", "--logprobs", "1")
    assert (refused.exit_code, "--logprobs goes with --json" in refused.stderr) == (2, True)


def test_unset_sampling_is_the_models_own(run: Run, llms: list[FakeLLM]) -> None:
    run("generate", "m", "--prompt", "p", "--top-p", "0.5")
    assert llms[0].params == [SamplingParams(temperature=0.6, top_p=0.5)]


def test_every_sampling_option(run: Run, llms: list[FakeLLM]) -> None:
    result = run(
        *(
            "generate",
            "m",
            "--prompt",
            "p",
            "--max-tokens",
            "2",
            "--temperature",
            "0",
            "--top-k",
            "3",
            "--top-p",
            "0.9",
        ),
        *("--min-p", "0.1", "--repetition-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "-0.3"),
        *("--logit-bias", "7:-1.5", "--logit-bias", "8:2", "--seed", str(2**64 - 1), "--stop", "\n", "--stop", "b"),
        *("--stop-token-id", "5", "--ignore-eos", "--logprobs", "2", "--time-limit", "1.5", "--json"),
    )
    assert result.exit_code == 0, result.stderr
    assert llms[0].params == [
        SamplingParams(
            max_tokens=2,
            temperature=0.0,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=-0.3,
            logit_bias={7: -1.5, 8: 2.0},
            seed=2**64 - 1,
            stop=("\n", "b"),
            stop_token_ids=(5,),
            ignore_eos=True,
            logprobs=2,
            time_limit_s=1.5,
        )
    ]


def test_chat(run: Run, llms: list[FakeLLM]) -> None:
    run("generate", "m", "--chat", "hi", "--system", "be brief")
    assert bytes(llms[0].prompts[0][1:]) == b"system:be brief|user:hi"


def test_prompt_file_is_taken_byte_for_byte(run: Run, llms: list[FakeLLM], tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_bytes("\ufeff  línea\r\n🎉\n\n".encode())
    run("generate", "m", "--prompt-file", str(file))
    assert bytes(llms[0].prompts[0]) == file.read_bytes()


@pytest.mark.parametrize("option", ["--prompt", "--prompt-file", "--chat"])
def test_input_from_a_pipe(run: Run, llms: list[FakeLLM], option: str) -> None:
    run("generate", "m", option, "-", input="línea\r\n")
    assert bytes(llms[0].prompts[0]).endswith("línea\r\n".encode())


def test_prompt_file_that_is_not_utf8(run: Run, llms: list[FakeLLM], tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"ok \xff no")
    result = run("generate", "m", "--prompt-file", str(file))
    assert result.exit_code == 2
    assert f"{file} is not UTF-8: invalid start byte (0xff) at byte 3" in result.stderr
    assert llms == [], "found out before the model is loaded"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give exactly one of --prompt, --prompt-file and --chat"),
        (["--prompt", "a", "--chat", "b"], "give exactly one of"),
        (["--prompt", "a", "--system", "b"], "--system goes with --chat"),
        (["--prompt-file", "/no/such/file"], "--prompt-file /no/such/file: No such file or directory"),
        (["--prompt", "a\udcff"], "--prompt is not UTF-8 at character 1"),
        (["--prompt", "a", "--top-p", "0"], "top_p: must be a number in (0, 1], got 0.0"),
        (["--prompt", "a", "--logit-bias", "x:1"], "'x:1' is no token id and number"),
        (["--prompt", "a", "--backend", "abacus"], "'abacus' is not one of 'auto', 'cpu'"),
        (["--prompt", "a", "--block-size", "7"], "block_size must be 8, 16, 32, 64 or 128, got 7"),
        (["--prompt", "a", "--kv-cache-bytes", "lots"], "'lots' is not a number of bytes"),
    ],
)
def test_wrong_usage_is_told_before_the_model_loads(
    run: Run, llms: list[FakeLLM], arguments: list[str], message: str
) -> None:
    result = run("generate", "m", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert llms == []


def test_engine_options_reach_the_engine(run: Run, llms: list[FakeLLM]) -> None:
    run(
        *("generate", "some.gguf", "--prompt", "p", "--backend", "cpu", "--threads", "3", "--kv-cache-bytes", "1.5MiB"),
        *("--activation-dtype", "float32", "--max-model-len", "99", "--no-prefix-caching", "--no-graph"),
        env={"NUMBA_ENGINE_GENERATE_BLOCK_SIZE": "32"},
    )
    config = llms[0].config
    assert llms[0].model == "some.gguf"
    assert (config.backend, config.num_threads, config.kv_cache_bytes) == ("cpu", 3, 1_572_864)
    assert (config.activation_dtype, config.max_model_len, config.prefix_caching) == ("float32", 99, False)
    assert (config.block_size, config.max_num_seqs) == (32, 64)
    assert (config.fusion, config.graph) == (True, False)


def _interrupt_at(step: int) -> Callable[[int], None]:
    def on_step(index: int) -> None:
        if index == step:
            os.kill(os.getpid(), signal.SIGINT)

    return on_step


def test_ctrl_c_ends_after_the_current_token(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "on_step", _interrupt_at(1))
    before = signal.getsignal(signal.SIGINT)
    result = run("generate", "m", "--prompt", "p", "--json")
    generation = json.loads(result.stdout)
    assert (generation["text"], generation["token_ids"]) == ("Par", [10, 11])
    assert (generation["finish_reason"], generation["usage"]["completion_tokens"]) == ("aborted", 2)
    assert result.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_ends_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(index: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(FakeLLM, "on_step", twice)
    result = run("generate", "m", "--prompt", "p")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")
