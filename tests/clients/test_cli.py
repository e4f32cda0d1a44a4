"""numba-engine-client against a server whose answers are known: what stands on stdout, on stderr, and the exit code."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from google.rpc import code_pb2

from numba_engine_api.v1 import inference_pb2 as pb
from numba_engine_client import cli
from tests.clients import fake_service as fake
from tests.clients.fake_service import FakeService, serving


@pytest.fixture
def service() -> FakeService:
    return FakeService({"Generate": fake.answer("Paris", " 🎉\n"), "Profile": fake.profile})


@pytest.fixture
def target(service: FakeService) -> Iterator[str]:
    with serving(service) as target:
        yield target


class Run:
    """Runs a command in this process; its exit code, stdout and stderr."""

    def __init__(self, target: str, capture: pytest.CaptureFixture[str]) -> None:
        self._target = target
        self._capture = capture

    def __call__(self, command: str, *arguments: str) -> tuple[int, str, str]:
        code = cli.main([command, "--target", self._target, *arguments])
        return code, *self._capture.readouterr()


@pytest.fixture
def run(target: str, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(target, capsys)


def test_generate_prints_the_text_and_nothing_else_to_stdout(run: Run) -> None:
    code, out, err = run("generate", "--prompt", "The capital of France is")
    assert (code, out) == (0, "Paris 🎉\n")
    assert err == (
        "prompt: 5 tokens (2 cached), first token after 0.050 s; output: 3 tokens, 100.0 tok/s; "
        "finished by max_tokens\n"
    )


def test_generate_quiet(run: Run) -> None:
    assert run("generate", "--prompt", "p", "--quiet") == (0, "Paris 🎉\n", "")


def test_generate_json(run: Run) -> None:
    code, out, err = run("generate", "--prompt", "p", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "request_id": "req-1",
        "prompt_token_ids": [1, 2, 3, 4, 5],
        "token_ids": [10, 11],
        "text": "Paris 🎉\n",
        "finish_reason": "max_tokens",
        "stop_sequence": None,
        "stop_token_id": None,
        "logprobs": None,
        "usage": {"prompt_tokens": 5, "cached_prompt_tokens": 2, "completion_tokens": 3},
        "timings": {
            "queue_s": 0.001,
            "ttft_s": 0.05,
            "prefill_s": 0.04,
            "decode_s": 0.02,
            "mean_inter_token_s": 0.01,
            "num_preemptions": 0,
        },
    }


def test_generate_sends_every_sampling_option(run: Run, service: FakeService) -> None:
    run(
        *("generate", "--prompt", "p", "--max-tokens", "9", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9"),
        *("--min-p", "0.1", "--repetition-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "0.3"),
        *("--logit-bias", "7:-1.5", "--logit-bias", "8:2", "--seed", "42", "--stop", "a", "--stop", "b"),
        *("--stop-token-id", "5", "--ignore-eos", "--logprobs", "2", "--time-limit", "1.5", "--request-id", "mine"),
    )
    request = service.requests[0]
    assert request == pb.GenerateRequest(
        request_id="mine",
        prompt="p",
        sampling=pb.SamplingParams(
            max_tokens=9,
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            logit_bias={7: -1.5, 8: 2},
            seed=42,
            stop=["a", "b"],
            stop_token_ids=[5],
            ignore_eos=True,
            logprobs=2,
            time_limit_s=1.5,
        ),
    )
    run("generate", "--chat", "hi", "--system", "be brief")
    assert [(m.role, m.content) for m in service.requests[1].chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert service.requests[1].sampling == pb.SamplingParams()


def test_prompt_file_is_taken_byte_for_byte(run: Run, service: FakeService, tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_bytes("\ufeff  línea\r\n🎉\n\n".encode())
    run("generate", "--prompt-file", str(file))
    assert service.requests[0].prompt == "\ufeff  línea\r\n🎉\n\n"
    file.write_bytes(b"ok \xff no")
    code, out, err = run("generate", "--prompt-file", str(file))
    assert (code, out) == (2, "")
    assert err == f"error: {file} is not UTF-8: invalid start byte (0xff) at byte 3\n"


def test_prompt_from_stdin(run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe\n")))
    run("generate", "--prompt", "-")
    assert service.requests[0].prompt == "from a pipe\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exactly one of --prompt, --prompt-file and --chat"),
        (["--prompt", "a", "--chat", "b"], "exactly one of"),
        (["--prompt", "a", "--system", "b"], "--system goes with --chat"),
        (["--prompt-file", "/no/such/file"], "No such file or directory: '/no/such/file'"),
        (["--prompt", "a", "--top-k", "-3"], "top_k = -3"),
        (["--prompt", "a", "--metadata", "token"], "write it as key=value"),
        (["--prompt", "a", "--cert-file", "x"], "--cert-file and --key-file go together"),
    ],
)
def test_wrong_usage_is_one_line(run: Run, service: FakeService, arguments: list[str], message: str) -> None:
    code, out, err = run("generate", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert service.requests == []


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("profile", ["--live", "--prompt", "p"], "at most one of"),
        ("profile", ["--synthetic", "1x8", "--live", "5"], "at most one of"),
        ("profile", ["--warm-up", "-1"], "warm_up_steps = -1"),
        ("estimate", ["--params", "8B", "--config", "pyproject.toml"], "either config_json or num_parameters"),
        ("estimate", ["--num-layers", "4"], "goes with num_parameters"),
        ("estimate", ["--draft-len", "4"], "goes with acceptance"),
    ],
)
def test_wrong_usage_of_the_others(
    run: Run, service: FakeService, command: str, arguments: list[str], message: str
) -> None:
    code, out, err = run(command, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert service.requests == []


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("profile", ["--synthetic", "4"], "'4' is no number of sequences and tokens such as 4x512"),
        ("profile", ["--detail", "all"], "invalid choice: 'all'"),
        ("estimate", ["--params", "many"], "'many' is no number of parameters"),
        ("estimate", ["--params", "inf"], "'inf' is no number of parameters"),
    ],
)
def test_wrong_values(
    run: Run, capsys: pytest.CaptureFixture[str], command: str, arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        run(command, *arguments)
    assert message in capsys.readouterr().err


def test_wrong_logit_bias(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("generate", "--prompt", "p", "--logit-bias", "x:1")
    assert "'x:1' is no token id and number" in capsys.readouterr().err


def test_refused_request_names_field_and_request(run: Run, service: FakeService) -> None:
    service.behaviours["Generate"] = lambda request, context: fake.refuse_field(context, "sampling.top_p", "too low")
    code, out, err = run("generate", "--prompt", "p")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "error: INVALID_ARGUMENT: sampling.top_p: too low",
        "  request id: req-17",
    ]


def test_full_server(run: Run, service: FakeService) -> None:
    service.behaviours["Generate"] = lambda request, context: fake.refuse_full(context, 0.05)
    code, _, err = run("generate", "--prompt", "p")
    assert (code, err.splitlines()[1]) == (1, "  the server asks to try again in 0.05 s")
    run("generate", "--prompt", "p", "--retries", "2")
    assert len(service.requests) == 1 + 3


def test_broken_stream_leaves_the_partial_text(run: Run, service: FakeService) -> None:
    def breaks(request: Any, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield fake.started()
        yield fake.delta("half", 1)
        fake.refuse(context, code_pb2.UNAVAILABLE, "gone")

    service.behaviours["Generate"] = breaks
    assert run("generate", "--prompt", "p") == (1, "half", "error: UNAVAILABLE: gone\n")


def test_profile_table(run: Run, service: FakeService) -> None:
    code, out, err = run("profile", "--num-tokens", "3", "--no-fusion")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["step", "prefill", "decode", "ms", "MB", "GB/s", "text"]
    assert lines[2].split()[:6] == ["1", "0", "1", "5.00", "60.0", "12.0"]
    assert "' word1\\n'" in lines[2]
    assert "tiny (llama, 135 M parameters, 98.0 MB as Q4_1, Q8_0)" in out
    assert "on cpu: EPYC; times by host clock, bytes by formula" in out
    rows = {line.split()[0]: line.split() for line in lines if line[:1].isalpha()}
    assert rows["linear"][1:9] == ["15", "3.000", "60.00", "20.0", "2", "57%", "memory", "60.0%"]
    assert rows["attention"][6:8] == ["57%", "latency"]
    figures = {line[:15].strip(): " ".join(line[15:].split()) for line in lines}
    assert figures["decode"] == "200.0 tok/s median of 2 steps; p10 190.0, p90 205.0"
    assert figures["a token moves"] == "98.0 MB weights 97.0 MB, KV 1.0 MB"
    assert figures["limit"] == "357.1 tok/s at the 35.0 GB/s that this machine reads, measured"
    assert figures["reached"] == "56% of that limit"
    assert figures["arithmetic idle"] == "87.5% of decode time, by formula of 0.4 TFLOPS (int8 dot products)"
    assert figures["host"] == "1.00 ms a decode step, 200.0 µs between ops; launches: 30"
    assert figures["looking cost"] == "30.0 µs a decode step; subtracted above"
    assert figures["a step"] == "4.90 ms without looking, 5.00 ms with it (4.00 ms in ops)"
    assert figures["memory"] == "500.0 MB of the process; weights 98.0 MB, KV 3.0 MB of 1.0 GB in use"
    assert (service.requests[0].num_tokens, service.requests[0].fusion) == (3, False)
    assert service.requests[0].prompt


def test_profile_that_was_aborted_says_so(run: Run, service: FakeService) -> None:
    whole = run("profile")[1]
    assert "ended early" not in whole

    def aborted(request: Any, context: grpc.ServicerContext) -> Iterator[pb.ProfileResponse]:
        for response in fake.profile(request, context):
            if response.HasField("summary"):
                response.summary.finish_reason = pb.FINISH_REASON_ABORTED
            yield response

    service.behaviours["Profile"] = aborted
    code, out, _ = run("profile")
    assert code == 0
    assert "\nended early: aborted; figures are of the steps until then\n" in out


def test_profile_of_made_up_prompts(run: Run, service: FakeService) -> None:
    code, out, _ = run(
        *("profile", "--synthetic", "4x512", "--detail", "timeline", "--warm-up", "3", "--unprofiled-every", "2")
    )
    request = service.requests[0]
    assert (request.synthetic.num_seqs, request.synthetic.prompt_len) == (4, 512)
    assert (request.detail, request.warm_up_steps, request.unprofiled_every) == (pb.PROFILE_DETAIL_TIMELINE, 3, 2)
    assert code == 0
    lines = out.splitlines()
    assert "calls of step 2" in lines
    rows = [line.split() for line in lines[lines.index("calls of step 2") :]]
    [linear] = [row for row in rows if row[:2] == ["linear", "3"]]
    assert " ".join(linear[2:]) == "0.0 µs 500.0 µs 600.0 µs 700.0 µs 2", "first at, fastest, median, slowest, layer"
    [embedding] = [row for row in rows if row[:1] == ["embedding"]]
    assert embedding[-1] == "-", "it is in no layer"
    assert lines[3].split()[:6] == ["2", "0", "1", "5.00", "-", "-"], "that step was not looked at"


def test_profile_of_a_device_that_counts(run: Run, service: FakeService) -> None:
    def counting(request: pb.ProfileRequest, context: grpc.ServicerContext) -> Iterator[pb.ProfileResponse]:
        *before, last = fake.profile(request, context)
        dram, lanes = pb.BytesByKind(weights=60_000_000, scratch=2_000_000), pb.BytesByKind(kv=4_000)
        counted = pb.CountedTraffic(dram=dram, lanes=lanes, shared_wavefronts=3, shared_wavefronts_ideal=2)
        last.summary.ops[0].counted.CopyFrom(counted)
        yield from [*before, last]

    service.behaviours["Profile"] = counting
    lines = [" ".join(line.split()) for line in run("profile")[1].splitlines()]
    at = lines.index("bytes a step, as counted")
    assert lines[at + 2] == "linear 60.0 MB 31.0 MB 0 B 2.0 kB 0 B 1.50 ×", "one of two steps"


def test_profile_of_live_traffic(run: Run, service: FakeService) -> None:
    code, _, err = run("profile", "--live")
    assert (code, err) == (0, "waiting for requests to profile …\n")
    assert service.requests[0].live.num_steps == 100
    assert run("profile", "--live", "7", "--detail", "summary")[0] == 0
    assert (service.requests[1].live.num_steps, service.requests[1].detail) == (7, pb.PROFILE_DETAIL_SUMMARY)


def test_ctrl_c_ends_a_watch_with_its_summary(run: Run, service: FakeService) -> None:
    aborted = threading.Event()
    as_ever = signal.getsignal(signal.SIGINT)

    def watch(request: pb.ProfileRequest, context: grpc.ServicerContext) -> Iterator[pb.ProfileResponse]:
        *before, summary = fake.profile(request, context)
        yield from before
        while signal.getsignal(signal.SIGINT) is as_ever:
            time.sleep(0.001)  # until then it ends the command
        os.kill(os.getpid(), signal.SIGINT)
        assert aborted.wait(10)
        yield summary

    def abort(request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        assert request.request_id == service.requests[0].request_id
        aborted.set()
        return pb.AbortResponse()

    service.behaviours |= {"Profile": watch, "Abort": abort}
    code, out, _ = run("profile", "--live")
    assert code == 0
    assert "of that limit" in out
    assert signal.getsignal(signal.SIGINT) is as_ever


def test_estimate_of_one_gpu(run: Run, service: FakeService, tmp_path: Path) -> None:
    service.behaviours["EstimateThroughput"] = fake.estimates
    code, out, err = run(
        *("estimate", "--params", "8B", "--gpu", "rtx4090", "--weights", "fp16", "-b", "2", "--tp", "4"),
        *("--speculative-acceptance", "0", "--draft-len", "3", "--target-speed", "20"),
    )
    assert (code, err) == (0, "")
    request = service.requests[0]
    assert (request.size.num_parameters, request.size.HasField("num_layers")) == (8 * 10**9, False)
    assert (list(request.gpus), request.weight_format, request.kv_format) == (["rtx4090"], "fp16", "")
    assert (request.batch, request.HasField("context"), request.tensor_parallel) == (2, False, 4)
    assert request.HasField("speculation"), "an acceptance of 0 is one"
    assert (request.speculation.acceptance, request.speculation.draft_len, request.target_tokens_per_s) == (0, 3, 20)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "8B parameters: 8 G parameters; weights fp16, KV fp16; batch 1, context 1,024" in lines
    assert "NVIDIA rtx4090: 1,008 GB/s (datasheet), 25.8 GB GDDR6X" in lines
    assert "decode, a token 15.87 ms 63.0 15.87 ms 96.9 µs memory 0.61%" in lines
    assert "ridge: bound by arithmetic from batch 164" in lines
    assert "memory on each GPU: weights 16.0 GB + KV not counted = 16.0 GB of 25.8 GB: fits" in lines
    assert "near-memory compute decode 252.0 4.00 × memory 16.0 GB 4 × the bandwidth" in lines
    assert "arithmetic 8 G 1.5 a multiply-add 12.0 mJ 23.1%" in lines
    assert "together 52.0 mJ; at TDP for the time of a token 7.14 J" in lines
    assert lines[-3:] == ["a whitepaper", "a paper", "a talk"]


def test_estimate_without_an_arithmetic_rate_says_nothing_of_prefill(run: Run, service: FakeService) -> None:
    def unknown(request: pb.EstimateThroughputRequest, context: grpc.ServicerContext) -> pb.EstimateThroughputResponse:
        response = fake.estimates(request, context)
        for one in response.estimates:
            one.ClearField("prefill")
        return response

    service.behaviours["EstimateThroughput"] = unknown
    out = run("estimate", "--gpu", "h200")[1]
    [prefill] = [line.split() for line in out.splitlines() if line.startswith("prefill, all prompts")]
    assert prefill == ["prefill,", "all", "prompts", "not", "known"]
    rows = {line.split()[0]: line.split() for line in run("estimate")[1].splitlines() if line}
    assert rows["rtx4090"][4:7] == ["memory", "not", "known"]


def test_estimate_of_all_gpus_and_a_config(run: Run, service: FakeService, tmp_path: Path) -> None:
    service.behaviours["EstimateThroughput"] = fake.estimates
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 64}')
    code, out, _ = run("estimate", "--config", str(config))
    assert code == 0
    assert service.requests[0].config_json == '{"hidden_size": 64}'
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["rtx4090"][1:7] == ["1,008", "15.87", "63.0", "memory", "63.0", "164"]
    assert rows["h200"][-3:] == ["does", "NOT", "fit"]
    estimates = json.loads(run("estimate", "--json")[1])["estimates"]
    assert not service.requests[1].WhichOneof("model"), "the server's own model"
    assert estimates[0]["num_parameters"] == 8 * 10**9
    assert estimates[0]["decode"]["bound"] == "BOUND_MEMORY"


def test_profile_json_has_numbers_as_numbers(run: Run) -> None:
    code, out, _ = run("profile", "--prompt", "p", "--json")
    profile = json.loads(out)
    assert code == 0
    assert profile["model"]["num_parameters"] == 134_515_008
    assert profile["device"]["time_source"] == "TIME_SOURCE_HOST_CLOCK"
    assert [step["index"] for step in profile["steps"]] == [0, 1, 2]
    assert profile["steps"][1]["ops"][0]["weight_bytes"] == 60_000_000
    assert profile["steps"][1]["ops"][1]["weight_bytes"] == 0
    assert profile["summary"]["shares"][0] == {"name": "linear", "share": 0.6}


def test_status_and_model_info(run: Run, service: FakeService) -> None:
    stats = pb.EngineStats(num_running=2, completion_tokens=12_345)
    status = pb.GetStatusResponse(state=pb.SERVER_STATE_READY, uptime_s=1.5, engine=stats)
    service.behaviours["GetStatus"] = lambda request, context: status
    info = pb.GetModelInfoResponse(name="tiny", eos_token_ids=[2, 5], default_sampling=pb.SamplingParams(top_k=40))
    service.behaviours["GetModelInfo"] = lambda request, context: info
    code, out, _ = run("status")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if len(line.split()) > 1)
    assert (code, rows["state"], rows["engine.completion_tokens"]) == (0, "SERVER_STATE_READY", "12,345")
    assert json.loads(run("status", "--json")[1])["engine"]["completion_tokens"] == 12_345
    info_json = json.loads(run("model-info", "--json")[1])
    assert (info_json["eos_token_ids"], info_json["default_sampling"]["top_k"]) == ([2, 5], 40)
    assert "2, 5" in run("model-info")[1]


def test_tokenize_detokenize_abort(run: Run, service: FakeService) -> None:
    service.behaviours["Tokenize"] = lambda request, context: pb.TokenizeResponse(token_ids=[len(request.text), 7])
    service.behaviours["Detokenize"] = lambda request, context: pb.DetokenizeResponse(text=f"<{request.token_ids[0]}>")
    service.behaviours["Abort"] = lambda request, context: pb.AbortResponse(usage=fake.USAGE)
    assert run("tokenize", "--prompt", "four") == (0, "4 7\n", "")
    assert run("tokenize", "--chat", "hi", "--json") == (0, "[0, 7]\n", "")
    assert run("detokenize", "5", "6") == (0, "<5>", "")
    assert json.loads(run("abort", "mine", "--json")[1])["completion_tokens"] == 3
    assert service.requests[-1].request_id == "mine"


def test_health(run: Run) -> None:
    assert run("health") == (1, "NOT_SERVING\n", "")
    assert run("health", "--liveness") == (0, "SERVING\n", "")


def test_wait_tells_each_reason_once(run: Run, service: FakeService) -> None:
    loading = pb.GetStatusResponse(state=pb.SERVER_STATE_LOADING, detail="weights")
    states = iter([loading, loading, pb.GetStatusResponse(state=pb.SERVER_STATE_READY)])
    service.behaviours["GetStatus"] = lambda request, context: next(states)
    assert run("wait", "--for", "20") == (0, "", "loading: weights\n")
    service.behaviours["GetStatus"] = lambda request, context: loading
    code, _, err = run("wait", "--for", "0.3", "--quiet")
    assert (code, err) == (1, "error: not ready after 0.3 s: loading: weights\n")


def test_chat_keeps_the_history(run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["hello", "", "/nothing", "and then?", "/undo", "again", "/reset", "anew", "/exit", "never said"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    code, out, err = run("chat", "--system", "s", "--temperature", "0")
    assert (code, out) == (0, "Paris 🎉\n\n" * 4)
    assert "there is no /nothing" in err
    said = [[m.content for m in request.chat.messages] for request in service.requests]
    answer = "Paris 🎉\n"
    assert said == [["s", "hello"], ["s", "hello", answer, "and then?"], ["s", "hello", answer, "again"], ["s", "anew"]]
    assert all(request.sampling.HasField("temperature") for request in service.requests)


def test_chat_survives_an_error(run: Run, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([lambda *_: fake.refuse(_[1], code_pb2.INTERNAL, "oops"), fake.answer("fine")])
    service.behaviours["Generate"] = lambda request, context: next(answers)(request, context)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    code, out, err = run("chat")
    assert (code, out, err) == (0, "\nfine\n", "error: INTERNAL: oops\n")
    assert [m.content for m in service.requests[1].chat.messages] == ["two"]


def test_chat_one_message(run: Run, service: FakeService) -> None:
    assert run("chat", "--message", "hi") == (0, "Paris 🎉\n\n", "")
    assert [m.content for m in service.requests[0].chat.messages] == ["hi"]


def test_tls_with_an_authority_of_ones_own(
    service: FakeService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("inference.example")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    with serving(service, grpc.ssl_server_credentials([(issued.private_key_pem.bytes(), chain)])) as target:
        tls = ("--target", target, "--ca-file", str(tmp_path / "ca.pem"))
        assert cli.main(["generate", "--prompt", "p", *tls, "--authority", "inference.example"]) == 0
        assert capsys.readouterr().out == "Paris 🎉\n"
        assert cli.main(["generate", "--prompt", "p", *tls]) == 1, "the certificate is for another name"


def test_ctrl_c_cancels_and_keeps_what_was_written(service: FakeService, target: str) -> None:
    service.behaviours["Generate"] = fake.endless
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "numba_engine_client", "generate", "--target", target, "--prompt", "p"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(2)
        process.send_signal(signal.SIGINT)
        rest, complaint = process.stdout.read(), process.stderr.read()
        assert process.wait(10) == 130
    assert (first, complaint) == (b"0 ", b"")
    assert rest == b"".join(b"%d " % index for index in range(1, rest.count(b" ") + 1))
    assert service.cancelled.wait(5)
