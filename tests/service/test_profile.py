"""Profile: one message a step, then the summary; one at a time; live traffic goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from numba_engine_api.v1 import inference_pb2 as api
from tests.service.conftest import Serve, rest_of
from tests.service.fake_llm import END_TOKEN, FakeLLM
from tests.service.test_errors import details_of, failure_of, generate


def profile(**fields: Any) -> api.ProfileRequest:
    return api.ProfileRequest(**{"prompt": "ab", "num_tokens": 4} | fields)


async def test_device_model_steps_summary(serve: Serve) -> None:
    async with serve() as served:
        events = [event async for event in served.stub.Profile(profile())]
        assert [e.WhichOneof("event") for e in events] == ["device", "model", *["step"] * 4, "summary"]

        device, model = events[0].device, events[1].model
        assert (device.backend, device.name, device.num_threads) == ("cpu", "none", 2)
        assert device.time_source == api.TIME_SOURCE_HOST_CLOCK
        assert (model.name, model.architecture, model.num_parameters, model.weight_bytes) == (
            "fake",
            "echo",
            1234,
            5678,
        )
        assert (list(model.weight_formats), model.kv_bytes_per_token) == (["Q4_1", "F32"], 100)

        steps = [e.step for e in events[2:-1]]
        assert [s.index for s in steps] == [0, 1, 2, 3]
        assert [(s.num_prefill_tokens, s.num_decode_tokens, s.num_seqs) for s in steps] == [(1, 0, 1)] + [(0, 1, 1)] * 3
        assert [s.text for s in steps] == ["a", "b", "a", "b"]
        [op] = steps[2].ops
        assert (op.name, op.num_calls, op.time_s, op.weight_bytes, op.kv_bytes) == ("linear", 3, 0.5, 1000, 20)
        assert (op.activation_bytes, op.flops, op.kv_written_bytes, op.activation_written_bytes) == (300, 4000, 7, 80)
        assert steps[0].overhead_s == 0.125
        assert op.gbps == pytest.approx((1000 + 20 + 300) / 0.5 / 1e9)

        summary = events[-1].summary
        assert (summary.num_prefill_steps, summary.num_decode_steps) == (1, 3)
        assert (summary.prefill_tokens_per_s, summary.decode_tokens_per_s) == (11, 22)
        assert (summary.read_bandwidth_gbps, summary.bytes_per_token) == (33, 44)
        assert (summary.weight_bytes_per_token, summary.kv_bytes_per_token) == (40, 4)
        assert summary.overhead_s_per_step == 0.0625
        assert (summary.floor_s, summary.share_of_floor) == (0.5, 0.25)
        assert [(s.name, s.share) for s in summary.shares] == [("linear", 0.75), ("host", 0.25)]
        assert [op.num_calls for op in summary.ops] == [30]
        assert summary.finish_reason == api.FINISH_REASON_MAX_TOKENS
        assert summary.usage.completion_tokens == 4
        assert not served.llm.profile_is_on


async def test_it_is_greedy_and_goes_past_the_end_token(serve: Serve) -> None:
    async with serve() as served:
        token_ids = api.TokenIds(ids=[65, END_TOKEN])
        events = [e async for e in served.stub.Profile(profile(token_ids=token_ids, num_tokens=5))]
        assert len(events) == 8
        [params] = served.llm.seen_params
        assert (params.temperature, params.ignore_eos, params.max_tokens) == (0.0, True, 5)


async def test_the_number_of_tokens_and_fusion_by_default_and_on_request(serve: Serve) -> None:
    async with serve() as served:
        await asyncio.gather(*[_read(served.stub.Profile(api.ProfileRequest(prompt="a")))])
        await _read(served.stub.Profile(profile(fusion=False)))
        await _read(served.stub.Profile(profile(fusion=True)))
        assert [params.max_tokens for params in served.llm.seen_params] == [32, 4, 4]
        assert served.llm.profiles == [True, False, True]


async def _read(call: Any) -> list[Any]:
    return [event async for event in call]


async def test_one_at_a_time_beside_live_traffic(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        live = served.stub.Generate(generate(max_tokens=6))
        await live.read()
        running = served.stub.Profile(profile(request_id="first", num_tokens=4))
        await served.step_until(lambda status: status.profiling and status.engine.num_running == 2)

        error = await failure_of(served.stub.Profile(profile()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "'first'" in error.details()
        assert details_of(error)["ErrorInfo"].reason == "PROFILE_BUSY"
        assert details_of(error)["RetryInfo"].retry_delay.seconds == 5

        served.llm.open_gate()
        events = await _read(running)
        assert events[2].step.num_seqs == 2, "the steps are shared, and reported so"
        assert events[-1].summary.finish_reason == api.FINISH_REASON_MAX_TOKENS
        assert "".join([event.delta.text async for event in rest_of(live)]) == "ababab"
        await served.until(lambda status: not status.profiling)
        assert len(await _read(served.stub.Profile(profile(num_tokens=1)))) == 4


async def test_a_cancelled_profile_stops_at_once(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        live = served.stub.Generate(generate(max_tokens=60))
        await live.read()
        running = served.stub.Profile(profile(num_tokens=50))
        await served.step_until(lambda status: status.engine.num_running == 2)
        assert served.llm.profile_is_on
        running.cancel()
        await served.until(lambda status: status.counters.cancelled == 1)
        steps = served.llm.num_steps
        served.llm.allow(1)
        await served.until(lambda status: status.engine.num_running == 1)
        assert served.llm.num_steps == steps + 1
        assert not served.llm.profile_is_on
        served.llm.open_gate()
        assert "".join([event.delta.text async for event in rest_of(live)]) == "ab" * 30


async def test_an_aborted_profile_still_has_its_summary(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        running = served.stub.Profile(profile(request_id="p", num_tokens=50))
        await served.step_until(lambda status: status.engine.num_running == 1)
        abort = asyncio.ensure_future(served.stub.Abort(api.AbortRequest(request_id="p")))
        await served.step_until(lambda status: status.engine.num_running == 0)
        last = (await _read(running))[-1].summary
        assert last.finish_reason == api.FINISH_REASON_ABORTED
        assert last.usage == (await abort).usage
        assert not served.llm.profile_is_on


async def test_a_profile_that_is_refused_leaves_none_on(serve: Serve) -> None:
    async with serve() as served:
        served.llm.fail_in_add = TypeError("bug")
        assert (await failure_of(served.stub.Profile(profile()))).code() is grpc.StatusCode.INTERNAL
        assert not served.llm.profile_is_on
        served.llm.fail_in_add = None
        assert (await _read(served.stub.Profile(profile())))[-1].HasField("summary")
