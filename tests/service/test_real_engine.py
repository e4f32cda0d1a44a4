"""The service over the real engine, with a tiny random model: right texts under load, places freed, floods refused."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from numba_engine import LLM, EngineConfig
from numba_engine.profiling import ProfileSession
from numba_engine_api.v1 import inference_pb2 as api
from tests.service.conftest import Serve, Served, rest_of
from tests.service.test_errors import details_of
from tests.tiny_models import TinyModel, write_hf

pytestmark = pytest.mark.kernels

NUM_STREAMS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("served") / "model", TinyModel())


@pytest.fixture
async def served(serve: Serve, model: Path) -> AsyncIterator[Served]:
    config = EngineConfig(backend="cpu", num_threads=2, max_num_seqs=8, max_waiting=NUM_STREAMS, num_kv_blocks=128)
    async with serve(load=lambda progress: ProfileSession(LLM(str(model), config, progress=progress))) as served:
        yield served


def request(i: int, max_tokens: int) -> api.GenerateRequest:
    """Greedy and seeded by turns, prompts of many lengths, some with a common beginning."""
    sampling = api.SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=max_tokens, ignore_eos=True)
    return api.GenerateRequest(prompt="the quick brown fox " * (i % 5) + f"jumps {i}", sampling=sampling)


async def text_and_ids(call: Any) -> tuple[str, list[int], str]:
    events = [event async for event in call]
    deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
    ids = [i for delta in deltas for i in delta.token_ids]
    return "".join(delta.text for delta in deltas), ids, api.FinishReason.Name(events[-1].finished.finish_reason)


async def test_64_streams_at_once_have_the_texts_they_have_alone(served: Served, model: Path) -> None:
    calls = [text_and_ids(served.stub.Generate(request(i, 5 + i % 7))) for i in range(NUM_STREAMS)]
    together = await asyncio.gather(*calls)
    status = await served.status()
    assert (status.engine.num_running, status.counters.finished) == (0, NUM_STREAMS)
    llm = LLM(str(model), EngineConfig(backend="cpu", num_threads=1, prefix_caching=False, num_kv_blocks=32))
    for i in range(NUM_STREAMS):
        sampling = request(i, 5 + i % 7).sampling
        params = dataclasses.replace(
            llm.default_sampling,
            temperature=sampling.temperature,
            seed=i,
            max_tokens=sampling.max_tokens,
            ignore_eos=True,
        )
        [alone] = llm.generate([request(i, 1).prompt], params)
        assert together[i] == (alone.text, list(alone.token_ids), "FINISH_REASON_MAX_TOKENS"), f"request {i}"


async def test_a_cancelled_stream_frees_its_place_and_blocks(served: Served) -> None:
    free = (await served.status()).engine.num_free_kv_blocks
    call = served.stub.Generate(request(1, 400))
    await call.read()
    await served.until(lambda status: status.engine.num_running == 1)
    call.cancel()
    status = await served.until(lambda status: status.counters.cancelled == 1 and status.engine.num_running == 0)
    assert status.engine.num_free_kv_blocks == free


async def test_a_flood_past_the_queue(serve: Serve, model: Path) -> None:
    config = EngineConfig(backend="cpu", num_threads=2, max_num_seqs=2, max_waiting=3, num_kv_blocks=128)
    async with serve(load=lambda progress: ProfileSession(LLM(str(model), config, progress=progress))) as served:
        calls = [text_and_ids(served.stub.Generate(request(i, 100))) for i in range(NUM_STREAMS)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert details_of(error)["RetryInfo"].HasField("retry_delay")
        # 5 have a place at once; those that finish during the flood make room for some more.
        assert 0 < len(errors) <= NUM_STREAMS - 5
        finished = [result for result in results if isinstance(result, tuple)]
        assert {(len(ids), reason) for _, ids, reason in finished} == {(100, "FINISH_REASON_MAX_TOKENS")}
        text, ids, _ = await text_and_ids(served.stub.Generate(request(0, 20)))
        assert (await served.stub.Detokenize(api.DetokenizeRequest(token_ids=ids))).text == text


async def test_a_profile_beside_live_streams_changes_no_token(served: Served) -> None:
    alone = await text_and_ids(served.stub.Generate(request(3, 60)))
    live = asyncio.create_task(text_and_ids(served.stub.Generate(request(3, 60))))
    profiled = served.stub.Profile(api.ProfileRequest(prompt="the quick brown fox", num_tokens=8))
    events = [event async for event in profiled]
    assert [event.WhichOneof("event") for event in events[:2]] == ["device", "model"]
    steps, summary = [event.step for event in events[2:-1]], events[-1].summary
    assert len(steps) >= 8
    assert all(step.time_s >= sum(op.time_s for op in step.ops) > 0 for step in steps)
    assert summary.usage.completion_tokens == 8
    assert summary.read_bandwidth_gbps > 0.1
    assert sum(share.share for share in summary.shares) == pytest.approx(1)
    assert await live == alone


async def test_profiles_under_8_live_streams_change_no_token(served: Served) -> None:
    alone = [await text_and_ids(served.stub.Generate(request(i, 100))) for i in range(8)]
    watch = served.stub.Profile(
        api.ProfileRequest(
            live=api.LiveTraffic(num_steps=40), fusion=False, detail=api.PROFILE_DETAIL_TIMELINE, unprofiled_every=3
        )
    )
    assert [(await watch.read()).WhichOneof("event") for _ in range(3)] == ["device", "model", "waiting"]
    live = [asyncio.create_task(text_and_ids(served.stub.Generate(request(i, 100)))) for i in range(8)]
    *steps, last = [event async for event in rest_of(watch)]
    assert len(steps) == 40
    assert max(event.step.num_seqs for event in steps) >= 2, "how many meet depends on how fast they arrive"
    assert last.summary.num_prefill_steps + last.summary.num_decode_steps + last.summary.num_unprofiled_steps == 40
    assert last.summary.num_unprofiled_steps >= 5
    synthetic = api.SyntheticWorkload(num_seqs=2, prompt_len=30)
    profiled = served.stub.Profile(api.ProfileRequest(synthetic=synthetic, num_tokens=3, warm_up_steps=1))
    *_, last = [event async for event in profiled]
    assert last.summary.usage.prompt_tokens == 60
    assert last.summary.usage.completion_tokens >= 8, "one each from the prompts; more where one waits for its place"
    assert await asyncio.gather(*live) == alone
    status = await served.until(lambda status: status.engine.num_running == 0)
    assert (status.engine.num_waiting, status.counters.in_flight, status.profiling) == (0, 0, False)


async def test_tokenising_a_long_prompt_does_not_hold_up_the_loop(served: Served) -> None:
    text = "the quick brown fox jumps over it " * 30_000  # just below the limit of 1 MiB: about half a second
    tokenizing = asyncio.ensure_future(served.stub.Tokenize(api.TokenizeRequest(text=text)))
    answers = 0
    while not tokenizing.done():
        await served.status()
        answers += 1
    assert len((await tokenizing).token_ids) > 2**16
    assert answers > 20, "the server stood still"
