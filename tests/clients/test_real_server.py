"""Client, command line and server together: a process that serves a tiny model, from start to SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from numba_engine_api.v1 import inference_pb2 as pb
from numba_engine_client import AsyncClient, Client, InvalidRequestError, NotFoundError, cli

pytestmark = pytest.mark.kernels

SERVE = ("--backend", "cpu", "--threads", "2", "--num-kv-blocks", "64")


@dataclass
class Serving:
    process: subprocess.Popen[str]
    target: str


@pytest.fixture(scope="module")
def serving(tiny_gguf: Path) -> Iterator[Serving]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "service", "serve", str(tiny_gguf), "--port", "0", "--log-format", "json", *SERVE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            lines = (json.loads(line) for line in process.stderr)
            address = next(line["address"] for line in lines if line["event"] == "listening")
            yield Serving(process, address)
        finally:
            process.kill()


@pytest.fixture
def client(serving: Serving) -> Iterator[Client]:
    with Client(serving.target, timeout=60) as client:
        client.wait_ready(60)
        yield client


def test_stream_is_whole_and_repeatable(client: Client) -> None:
    stream = client.generate("the quick", temperature=0.9, seed=3, max_tokens=16, ignore_eos=True, logprobs=1)
    texts = [delta.text for delta in stream]
    result = stream.result
    assert (result.text, len(result.token_ids), len(result.logprobs)) == ("".join(texts), 16, 16)
    assert (result.finish_reason, result.usage.completion_tokens) == ("max_tokens", 16)
    assert client.detokenize(result.token_ids) == result.text
    again = client.generate("the quick", temperature=0.9, seed=3, max_tokens=16, ignore_eos=True).read()
    assert again.token_ids == result.token_ids
    ids = client.tokenize("the quick")
    assert result.prompt_token_count == len(ids)
    by_ids = client.generate(token_ids=ids, temperature=0.9, seed=3, max_tokens=16, ignore_eos=True).read()
    assert by_ids.token_ids == result.token_ids


async def test_async_streams_side_by_side(serving: Serving, client: Client) -> None:
    alone = [client.generate(f"side {n}", temperature=0, max_tokens=9, ignore_eos=True).read() for n in range(3)]
    async with AsyncClient(serving.target, timeout=60) as async_client:
        streams = [async_client.generate(f"side {n}", temperature=0, max_tokens=9, ignore_eos=True) for n in range(3)]
        together = [await stream.read() for stream in streams]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]


def test_wrong_parameters_name_their_fields(client: Client) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.generate_text("p", top_p=0, min_p=2)
    assert [violation.field for violation in caught.value.violations] == ["sampling.top_p", "sampling.min_p"]
    assert caught.value.request_id


def test_leaving_a_stream_frees_its_place(client: Client) -> None:
    with client.generate("p", temperature=0, ignore_eos=True, max_tokens=400) as stream:
        next(stream)
        assert client.status().engine.num_running == 1
    _until_idle(client)
    assert client.status().counters.cancelled >= 1


def test_abort_keeps_the_text(client: Client) -> None:
    stream = client.generate("p", temperature=0, ignore_eos=True, max_tokens=400, request_id="doomed")
    first = next(stream)
    assert client.abort("doomed").prompt_tokens >= 1
    result = stream.read()
    assert result.finish_reason == "aborted"
    assert result.text.startswith(first.text)
    with pytest.raises(NotFoundError):
        client.abort("doomed")


def test_profile(client: Client) -> None:
    stream = client.profile("the quick", num_tokens=4)
    steps = list(stream)
    assert [step.num_decode_tokens for step in steps] == [0, 1, 1, 1]
    assert stream.summary is not None
    assert stream.summary.num_decode_steps == 3
    assert stream.summary.usage.completion_tokens == 4


def test_a_synthetic_timeline(client: Client) -> None:
    stream = client.profile(
        synthetic={"num_seqs": 3, "prompt_len": 5}, num_tokens=3, detail="timeline", warm_up_steps=2
    )
    prefill, *decode = stream
    assert (prefill.num_prefill_tokens, [step.num_decode_tokens for step in decode]) == (15, [3, 3, 3])
    for step in decode:
        layers = [call.layer for call in step.calls if call.name == "attention" and call.HasField("layer")]
        assert layers == [0, 1]
        ends = [call.start_s + call.time_s for call in step.calls]
        assert all(later.start_s >= end - 1e-5 for end, later in zip(ends, step.calls[1:], strict=False))
        assert max(ends) <= step.time_s
        assert sum(call.flops for call in step.calls) == sum(op.flops for op in step.ops)
    assert stream.device is not None
    assert stream.device.peaks[0].source == pb.FIGURE_SOURCE_MEASURED
    assert stream.model is not None
    assert stream.summary is not None
    # One sequence at once would read what is said of a token; three share all but their rows of the embedding.
    of_a_token = {kind.name: kind.num_bytes for kind in stream.model.weight_bytes_per_token}
    assert 3 * stream.summary.weight_bytes_per_token == pytest.approx(
        sum(of_a_token.values()) + 2 * of_a_token["embed_tokens"], abs=3
    )
    assert stream.summary.memory.kv_used_bytes > 0


def test_facts(client: Client) -> None:
    info = client.model_info()
    assert (info.architecture, info.num_layers, info.has_chat_template, info.backend) == ("llama", 2, True, "cpu")
    assert client.status().state == pb.SERVER_STATE_READY
    assert client.health() == "SERVING"


def test_commands(serving: Serving, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    expected = client.generate(messages="hello", temperature=0, max_tokens=8).read().text
    greedy = ("--target", serving.target, "--temperature", "0", "--max-tokens", "8")
    assert cli.main(["generate", "--chat", "hello", *greedy]) == 0
    assert capsys.readouterr().out == expected
    assert cli.main(["chat", "--message", "hello", *greedy]) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert cli.main(["profile", "--target", serving.target, "--num-tokens", "3"]) == 0
    assert "of that limit" in capsys.readouterr().out
    assert cli.main(["estimate", "--target", serving.target, "--gpu", "h200", "--gpu", "this-machine"]) == 0
    rows = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line}
    assert {"h200", "this-machine"} <= rows


def test_sigterm_lets_the_stream_finish(serving: Serving, client: Client) -> None:
    stream = client.generate("p", temperature=0, ignore_eos=True, max_tokens=60)
    next(stream)
    serving.process.send_signal(signal.SIGTERM)
    assert stream.read().usage.completion_tokens == 60
    assert serving.process.wait(20) == 0


def _until_idle(client: Client) -> None:
    deadline = time.monotonic() + 10
    while client.status().engine.num_running:
        assert time.monotonic() < deadline, "the place is still taken"
        time.sleep(0.01)
