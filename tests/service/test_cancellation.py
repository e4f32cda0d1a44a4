"""A client that goes, waits too long, or reads too slowly: its place is free within one step, and it is counted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc

from numba_engine_api.v1 import inference_pb2 as api
from tests.service.conftest import PATIENCE_S, Serve, Served, rest_of
from tests.service.fake_llm import FakeLLM
from tests.service.test_errors import details_of, failure_of, generate


def places(status: api.GetStatusResponse) -> tuple[int, int]:
    return status.engine.num_running, status.engine.num_waiting


async def cancelled_within_one_step(served: Served, call: Any, left: tuple[int, int]) -> None:
    """Cancels a call and lets the engine take one step: then only what should be left is in it."""
    call.cancel()
    await served.until(lambda status: status.counters.cancelled == 1)
    steps = served.llm.num_steps
    served.llm.allow(1)
    await served.until(lambda status: places(status) == left)
    assert served.llm.num_steps == steps + 1
    assert (await served.status()).engine.num_aborted == 1


async def test_cancelled_in_mid_decode(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        call = served.stub.Generate(generate())
        served.llm.allow(2)
        assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["started", "delta"]
        await served.until(lambda status: places(status) == (1, 0))
        await cancelled_within_one_step(served, call, (0, 0))


async def test_cancelled_between_prompt_chunks(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True, prefill_chunk=1)) as served:
        call = served.stub.Generate(generate("x" * 100))
        served.llm.allow(3)
        await served.until(lambda status: status.engine.num_steps == 3)
        assert (await call.read()).started.prompt_token_count == 100
        await cancelled_within_one_step(served, call, (0, 0))
        assert (await served.status()).engine.completion_tokens == 0


async def test_cancelled_while_queued(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True, max_num_seqs=1)) as served:
        running = served.stub.Generate(generate())
        await running.read()
        queued = served.stub.Generate(generate())
        await served.step_until(lambda status: places(status) == (1, 1))
        await queued.read()
        await cancelled_within_one_step(served, queued, (1, 0))
        running.cancel()


async def test_cancelled_while_tokenised_never_reaches_the_engine(serve: Serve) -> None:
    async with serve() as served:
        entered = asyncio.Event()
        loop = asyncio.get_running_loop()
        served.llm.in_tokenize = lambda: loop.call_soon_threadsafe(entered.set)
        call = served.stub.Generate(generate())
        await entered.wait()
        call.cancel()
        await served.until(lambda status: status.counters.in_flight == 0)
        # It was either still with the tokeniser or already in the engine; nowhere is anything left of it.
        await served.until(lambda status: places(status) == (0, 0) and status.counters.cancelled == 1)


async def test_a_lost_connection_counts_as_cancelled(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        channel = grpc.aio.insecure_channel(served.address)
        call = channel.unary_stream(
            "/numba_engine_api.v1.InferenceService/Generate",
            request_serializer=api.GenerateRequest.SerializeToString,
            response_deserializer=api.GenerateResponse.FromString,
        )(generate())
        await call.read()
        await channel.close()
        await served.until(lambda status: status.counters.cancelled == 1)
        served.llm.allow(1)
        await served.until(lambda status: places(status) == (0, 0))


async def test_the_deadline_frees_the_place_and_keeps_what_came(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        call = served.stub.Generate(generate(), timeout=0.3)
        served.llm.allow(2)
        assert (await call.read()).WhichOneof("event") == "started"
        text = ""
        while text != "ab":
            text += (await call.read()).delta.text
        assert (await failure_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.until(lambda status: status.counters.deadline_exceeded == 1)
        served.llm.allow(1)
        await served.until(lambda status: places(status) == (0, 0))
        assert (await served.status()).counters.cancelled == 0


async def test_abort_finishes_the_stream_of_a_running_and_of_a_queued_request(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True, max_num_seqs=1)) as served:
        running = served.stub.Generate(generate(request_id="running"))
        await running.read()
        queued = served.stub.Generate(generate(request_id="queued"))
        await served.step_until(lambda status: places(status) == (1, 1))
        for call, request_id, left in ((queued, "queued", (1, 0)), (running, "running", (0, 0))):
            abort = asyncio.ensure_future(served.stub.Abort(api.AbortRequest(request_id=request_id)))
            await served.step_until(lambda status, left=left: places(status) == left)
            *_, last = [response async for response in rest_of(call)]
            assert last.finished.finish_reason == api.FINISH_REASON_ABORTED
            assert last.finished.usage.completion_tokens == (await abort).usage.completion_tokens
            assert bool(last.finished.usage.completion_tokens) == (call is running)
        assert (await served.status()).counters.aborted == 2
        await served.until(lambda status: places(status) == (0, 0))


async def test_abort_of_nothing(serve: Serve) -> None:
    async with serve() as served:
        error = await failure_of(served.stub.Abort(api.AbortRequest(request_id="never")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert details_of(error)["ErrorInfo"].reason == "UNKNOWN_REQUEST_ID"


SMALL_WINDOWS = (
    ("grpc.http2.lookahead_bytes", 1024),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_receive_message_length", -1),
)


async def test_a_slow_client_is_ended_and_delays_no_one(serve: Serve) -> None:
    llm = FakeLLM(max_model_len=10**7)
    async with serve(llm, max_pending_bytes=2048, channel_options=SMALL_WINDOWS) as served:
        # Log-probabilities make each token some hundred bytes.
        slow = served.stub.Generate(generate(logprobs=20))
        assert (await slow.read()).WhichOneof("event") == "started"
        # It reads no more. Others are served all the while.
        async with grpc.aio.insecure_channel(served.address) as channel:
            call = channel.unary_stream(
                "/numba_engine_api.v1.InferenceService/Generate",
                request_serializer=api.GenerateRequest.SerializeToString,
                response_deserializer=api.GenerateResponse.FromString,
            )
            others = [[r async for r in call(generate(max_tokens=50))] for _ in range(5)]
        assert [other[-1].finished.usage.completion_tokens for other in others] == [50] * 5
        await served.until(lambda status: places(status) == (0, 0))
        # What was sent arrives, then the status.
        error = await failure_of(slow)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(error)["ErrorInfo"].reason == "SLOW_CLIENT"
        await served.until(lambda status: status.counters.slow_client == 1)


async def test_a_client_that_never_reads_again_loses_its_call(serve: Serve) -> None:
    llm = FakeLLM(max_model_len=10**7)
    settings = {"max_pending_bytes": 2048, "stalled_client_s": 0.1, "max_in_flight": 1}
    async with serve(llm, **settings, channel_options=SMALL_WINDOWS) as served:
        stalled = served.stub.Generate(generate(logprobs=20))
        await stalled.read()
        await served.until(lambda status: status.counters.slow_client == 1 and places(status) == (0, 0))
        # Its place is free, although its status cannot be delivered.
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert (await served.stub.Tokenize(api.TokenizeRequest(text="a"))).token_ids == [97]
                break
            assert time.monotonic() < deadline


async def test_deltas_merge_for_a_client_that_lags(serve: Serve) -> None:
    llm = FakeLLM(max_model_len=10**7)
    async with serve(llm, channel_options=SMALL_WINDOWS) as served:
        call = served.stub.Generate(generate("abcdefg", max_tokens=20_000, logprobs=0))
        await call.read()
        await served.until(lambda status: places(status) == (0, 0))
        deltas = [r.delta async for r in rest_of(call) if r.WhichOneof("event") == "delta"]
        assert len(deltas) < 20_000
        assert "".join(d.text for d in deltas) == ("abcdefg" * 3000)[:20_000]
        assert [i for d in deltas for i in d.token_ids] == list((b"abcdefg" * 3000)[:20_000])
        assert [p.chosen.token_id for d in deltas for p in d.logprobs] == list((b"abcdefg" * 3000)[:20_000])


async def test_a_client_that_pings_each_second_keeps_its_idle_stream(serve: Serve) -> None:
    """By default gRPC ends a connection with all its streams after the third ping that it finds too early."""
    options = (
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with serve(FakeLLM(gated=True), channel_options=options) as served:
        call = served.stub.Generate(generate(max_tokens=2))
        assert (await call.read()).HasField("started")
        await asyncio.sleep(7)
        served.llm.open_gate()
        assert "".join([event.delta.text async for event in rest_of(call)]) == "ab"
