"""The server as a process: signals, exit codes, logs, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from click.testing import CliRunner

from numba_engine_api.v1 import inference_pb2 as api
from numba_engine_api.v1 import inference_pb2_grpc as api_grpc
from service.__main__ import cli
from tests.service.conftest import PATIENCE_S, Serve, rest_of
from tests.service.test_errors import generate

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'clients' / 'python'}"}


@dataclass
class Process:
    popen: asyncio.subprocess.Process
    log: list[str] = field(default_factory=list)
    port: int = 0

    async def until_logged(self, pattern: str) -> re.Match[str]:
        """The match in the first line, from here on, that has one."""
        assert self.popen.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            async for line in self.popen.stderr:
                self.log.append(line.decode().rstrip("\n"))
                if match := re.search(pattern, self.log[-1]):
                    return match
        raise AssertionError(f"{pattern!r} was not logged: {self.log}")

    async def exit_code(self) -> int:
        assert self.popen.stderr is not None
        self.log += (await asyncio.wait_for(self.popen.stderr.read(), PATIENCE_S)).decode().splitlines()
        return await asyncio.wait_for(self.popen.wait(), PATIENCE_S)


@asynccontextmanager
async def process(*args: str, module: str = "tests.service.fake_server", **environment: str) -> AsyncIterator[Process]:
    popen = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *args,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**ENVIRONMENT, **environment},
        cwd=ROOT,
    )
    try:
        yield Process(popen)
    finally:
        if popen.returncode is None:
            popen.kill()
        await popen.wait()


@asynccontextmanager
async def serving(*args: str) -> AsyncIterator[tuple[Process, Any]]:
    """A ready server and a stub of it."""
    async with process("--port=0", *args) as server:
        server.port = int((await server.until_logged(r"listening address=127\.0\.0\.1:(\d+)"))[1])
        await server.until_logged("ready model=fake")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, api_grpc.InferenceServiceStub(channel)


async def test_sigterm_lets_a_stream_finish_and_exits_with_0() -> None:
    async with serving("--step-delay=0.02") as (server, stub):
        call = stub.Generate(generate(max_tokens=20))
        await call.read()
        server.popen.send_signal(signal.SIGTERM)
        await server.until_logged("draining in_flight=1 timeout_s=30")
        events = [event async for event in rest_of(call)]
        assert events[-1].finished.finish_reason == api.FINISH_REASON_MAX_TOKENS
        assert "".join(event.delta.text for event in events) == "ab" * 10
        assert await server.exit_code() == 0
        assert server.log[-1].endswith("INFO closed")


async def test_sighup_drains_too_and_a_second_one_changes_nothing() -> None:
    async with serving("--step-delay=0.02") as (server, stub):
        call = stub.Generate(generate(max_tokens=20))
        await call.read()
        server.popen.send_signal(signal.SIGHUP)
        await server.until_logged("draining in_flight=1")
        server.popen.send_signal(signal.SIGHUP)
        events = [event async for event in rest_of(call)]
        assert events[-1].finished.finish_reason == api.FINISH_REASON_MAX_TOKENS
        assert await server.exit_code() == 0


async def test_sighup_is_ignored_where_it_was() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; a child inherits it
    try:
        async with serving() as (server, stub):
            server.popen.send_signal(signal.SIGHUP)
            assert "".join([event.delta.text async for event in stub.Generate(generate(max_tokens=4))]) == "abab"
            server.popen.send_signal(signal.SIGTERM)
            assert await server.exit_code() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_second_signal_ends_at_once() -> None:
    async with serving("--step-delay=0.02") as (server, stub):
        call = stub.Generate(generate(time_limit_s=60))
        await call.read()
        server.popen.send_signal(signal.SIGINT)
        await server.until_logged("draining")
        server.popen.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 128 + signal.SIGTERM
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in rest_of(call)]
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_text_that_is_being_tokenised_does_not_keep_the_process_alive() -> None:
    async with serving("--text-delay=60", "--drain-timeout=0.1") as (server, stub):
        calls = [stub.Tokenize(api.TokenizeRequest(text="a")), stub.Generate(generate("x" * 20_000)).read()]
        calls = [asyncio.ensure_future(call) for call in calls]
        async with asyncio.timeout(PATIENCE_S):
            while (await stub.GetStatus(api.GetStatusRequest())).counters.received < 1:
                await asyncio.sleep(0.01)
        server.popen.send_signal(signal.SIGTERM)
        await server.until_logged("closed")
        closed = time.monotonic()
        assert await server.exit_code() == 0
        assert time.monotonic() - closed < 2
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError):
                await call


async def test_a_signal_while_the_model_loads_does_not_wait_for_it() -> None:
    async with process("--port=0", "--load-delay=60") as server:
        await server.until_logged("listening")
        server.popen.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0


async def test_a_killed_client_frees_its_place() -> None:
    client = (
        "import grpc, sys; from numba_engine_api.v1 import inference_pb2 as api, inference_pb2_grpc as g;"
        "stub = g.InferenceServiceStub(grpc.insecure_channel(sys.argv[1]));"
        "[print(r.WhichOneof('event'), flush=True) for r in stub.Generate(api.GenerateRequest(prompt='ab'))]"
    )
    async with serving("--step-delay=0.02") as (server, stub):
        killed = await asyncio.create_subprocess_exec(
            sys.executable, "-c", client, f"127.0.0.1:{server.port}", stdout=asyncio.subprocess.PIPE, env=ENVIRONMENT
        )
        assert killed.stdout is not None
        assert [await killed.stdout.readline() for _ in range(2)] == [b"started\n", b"delta\n"]
        assert (await stub.GetStatus(api.GetStatusRequest())).engine.num_running == 1
        killed.kill()
        await killed.wait()
        async with asyncio.timeout(PATIENCE_S):
            while (status := await stub.GetStatus(api.GetStatusRequest())).engine.num_running:
                await asyncio.sleep(0.01)
        assert status.counters.cancelled == 1


async def test_json_logs_have_a_line_for_each_request_and_never_its_text() -> None:
    async with process("--port=0", "--log-format=json") as server:
        address = re.search(r"127\.0\.0\.1:\d+", (await server.until_logged("listening")).string)
        assert address is not None
        await server.until_logged("ready")
        async with grpc.aio.insecure_channel(address[0]) as channel:
            stub = api_grpc.InferenceServiceStub(channel)
            [_ async for _ in stub.Generate(generate("quiet", request_id="first", max_tokens=2))]
        server.popen.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0
        entries = [json.loads(line) for line in server.log]
        [request] = [entry for entry in entries if entry.get("rpc") == "Generate"]
        assert (request["event"], request["level"], request["request_id"]) == ("finished", "info", "first")
        assert (request["prompt_tokens"], request["completion_tokens"]) == (5, 2)
        assert request["finish_reason"] == "max_tokens"
        assert "quiet" not in "".join(server.log)


async def test_what_is_wrong_with_a_request_is_logged_without_its_texts() -> None:
    chat = api.Chat(messages=[api.ChatMessage(role="", content="quiet"), api.ChatMessage(role="quiet", content="")])
    requests = [
        generate(stop=["quiet" * 100, ""]),
        generate("quiet", temperature=-1),
        generate("quiet", request_id="quiet quiet"),
        api.GenerateRequest(chat=chat),
        generate("quiet", logit_bias={1: 101}),
    ]
    async with serving() as (server, stub):
        for request in requests:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        server.popen.send_signal(signal.SIGTERM)
        assert await server.exit_code() == 0
        assert "quiet" not in "".join(server.log)
        logged = [found[1] for line in server.log if (found := re.search(r"fields=(\S+)", line))]
        assert logged[:4] == ["sampling.stop", "sampling.temperature", "request_id", "chat.messages[0].role"]


async def test_options_come_from_the_environment_too() -> None:
    async with process(FAKE_SERVER_PORT="0", FAKE_SERVER_LOG_FORMAT="json") as server:
        assert json.loads((await server.until_logged("listening")).string)["event"] == "listening"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tls-cert=a.pem"], "tls_cert and tls_key go together: give both or neither"),
        (["--host=a b"], "host must be a name or an address, got 'a b'"),
        (["--max-num-seqs=0"], "max_num_seqs must be 1 to 4096, got 0"),
    ],
)
def test_what_serve_says_of_wrong_options(args: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["serve", "no-such-model", *args])
    assert (result.exit_code, result.output) == (2, f"Error: {message}\n")


async def test_what_serve_says_of_a_port_that_is_taken(serve: Serve) -> None:
    async with serve() as served, process("serve", "any", f"--port={served.server.port}", module="service") as server:
        assert await server.exit_code() == 2
        assert server.log == [
            f"Error: cannot listen on {served.address}: address already in use; choose another --host or --port"
        ]


async def test_what_serve_says_of_a_model_that_is_not_there() -> None:
    async with process("serve", "no-such-model", "--port=0", module="service") as server:
        assert await server.exit_code() == 1
        assert re.search("closing: the engine failed cause=.*no-such-model", "".join(server.log))
        assert "Traceback" not in "".join(server.log)


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    async with process("--port=0", f"--tls-cert={cert}", f"--tls-key={key}") as server:
        port = (await server.until_logged(r"listening address=127\.0\.0\.1:(\d+)"))[1]
        await server.until_logged("ready")
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            stub = api_grpc.InferenceServiceStub(channel)
            assert list((await stub.Tokenize(api.TokenizeRequest(text="é"))).token_ids) == [195, 169]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await api_grpc.InferenceServiceStub(channel).GetStatus(api.GetStatusRequest())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_key_that_is_not_the_certificate_s(tmp_path: Path) -> None:
    authority = trustme.CA()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(authority.issue_cert("localhost").cert_chain_pems[0].bytes())
    key.write_bytes(authority.issue_cert("localhost").private_key_pem.bytes())
    async with process("--port=0", f"--tls-cert={cert}", f"--tls-key={key}") as server:
        assert await server.exit_code() == 1
        assert "are no certificate and its key" in server.log[-1]
