"""Profile: one message a step, then the summary; one at a time; live traffic goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from numba_engine import CountedTraffic, TimeSource
from numba_engine.backends.instruments import KindBytes
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
        measured, datasheet = device.peaks
        assert (measured.name, measured.value, measured.unit) == ("read bandwidth", 33.0, "GB/s")
        assert (measured.source, measured.citation) == (api.FIGURE_SOURCE_MEASURED, "measured")
        assert (datasheet.name, datasheet.value, datasheet.unit) == ("fma", 0.1, "TFLOPS")
        assert (datasheet.source, datasheet.citation) == (api.FIGURE_SOURCE_DATASHEET, "a datasheet")
        assert device.peaks_of == "none"
        assert (model.name, model.architecture, model.num_parameters, model.weight_bytes) == (
            "fake",
            "echo",
            1234,
            5678,
        )
        assert (list(model.weight_formats), model.kv_bytes_per_token) == (["Q4_1", "F32"], 100)
        by_kind = [(kind.name, kind.num_bytes) for kind in model.weight_bytes_per_token]
        assert by_kind == [("embed_tokens", 8), ("qkv_proj", 32)]

        steps = [e.step for e in events[2:-1]]
        assert [s.index for s in steps] == [0, 1, 2, 3]
        assert [(s.num_prefill_tokens, s.num_decode_tokens, s.num_seqs) for s in steps] == [(1, 0, 1)] + [(0, 1, 1)] * 3
        assert [s.text for s in steps] == ["a", "b", "a", "b"]
        [op] = steps[2].ops
        assert (op.name, op.num_calls, op.time_s, op.weight_bytes, op.kv_bytes) == ("linear", 3, 0.5, 1000, 20)
        assert (op.activation_bytes, op.flops, op.kv_written_bytes, op.activation_written_bytes) == (300, 4000, 7, 80)
        assert steps[0].overhead_s == 0.125
        assert op.gbps == pytest.approx((1000 + 20 + 300) / 0.5 / 1e9)
        assert (op.num_launches, op.intensity) == (6, pytest.approx(4000 / 1320))
        # Its arithmetic takes 40 ns at the peak, its bytes as long at the read bandwidth: it waits for something else.
        assert op.share_of_attainable == pytest.approx(40e-9 / 0.5)
        assert op.bound == api.BOUND_LATENCY
        assert not op.HasField("counted"), "this device counts nothing"
        assert steps[2].launch_gap_s == 0.0625
        assert not steps[2].unprofiled
        assert not steps[2].calls, "only with TIMELINE"

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
        assert (summary.decode_tokens_per_s_p10, summary.decode_tokens_per_s_p90) == (20, 23)
        assert (len(summary.prefill_ops), [s.share for s in summary.prefill_shares]) == (2, [1.0])
        assert summary.decode_arithmetic_idle_share == 0.96875
        assert not summary.HasField("prefill_arithmetic_idle_share"), "it is not known"
        assert (summary.launches_per_step, summary.launch_gap_s_per_step, summary.host_s_per_step) == (6, 0.03125, 0.5)
        memory = summary.memory
        assert (memory.weight_bytes, memory.kv_cache_bytes, memory.kv_used_bytes) == (1000, 2000, 300)
        assert (memory.free_bytes, memory.process_bytes) == (4000, 5000)
        assert not served.session.profile_is_on


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
        assert served.session.profiles == [True, False, True]


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
        assert "first" not in str(error.details()), "its id would let another client abort it"
        assert details_of(error)["ErrorInfo"].reason == "PROFILE_BUSY"
        assert 5000 <= details_of(error)["RetryInfo"].retry_delay.ToMilliseconds() <= 7500

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
        assert served.session.profile_is_on
        running.cancel()
        await served.until(lambda status: status.counters.cancelled == 1)
        steps = served.llm.num_steps
        served.llm.allow(1)
        await served.until(lambda status: status.engine.num_running == 1)
        assert served.llm.num_steps == steps + 1
        assert not served.session.profile_is_on
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
        assert not served.session.profile_is_on


async def test_a_profile_that_is_refused_leaves_none_on(serve: Serve) -> None:
    async with serve() as served:
        served.llm.fail_in_add = TypeError("bug")
        assert (await failure_of(served.stub.Profile(profile()))).code() is grpc.StatusCode.INTERNAL
        assert not served.session.profile_is_on
        served.llm.fail_in_add = None
        assert (await _read(served.stub.Profile(profile())))[-1].HasField("summary")


# ---- workloads -----------------------------------------------------------------------------------------------------


def synthetic(num_seqs: int, prompt_len: int, **fields: Any) -> api.ProfileRequest:
    workload = api.SyntheticWorkload(num_seqs=num_seqs, prompt_len=prompt_len)
    return api.ProfileRequest(**{"synthetic": workload, "num_tokens": 3} | fields)


def kinds(events: list[Any]) -> list[str]:
    return [event.WhichOneof("event") for event in events]


async def test_synthetic_sequences_run_together(serve: Serve) -> None:
    async with serve() as served:
        events = await _read(served.stub.Profile(synthetic(3, 70)))
        assert kinds(events) == ["device", "model", *["step"] * 5, "summary"], "a prompt takes two steps"
        assert [event.step.num_seqs for event in events[2:-1]] == [3] * 5
        assert {event.step.text for event in events[2:-1]} == {""}, "the text of random tokens is no text"
        summary = events[-1].summary
        assert (summary.usage.prompt_tokens, summary.usage.completion_tokens) == (210, 12)
        assert summary.finish_reason == api.FINISH_REASON_MAX_TOKENS
        prompts = served.llm.seen_prompts
        assert len({tuple(prompt) for prompt in prompts}) == 3, "none is another's"
        await _read(served.stub.Profile(synthetic(3, 70)))
        assert prompts[0] not in served.llm.seen_prompts[3:], "and none is in the prefix cache the next time"


@pytest.mark.parametrize("warm_up_steps", [0, 1000])
async def test_synthetic_sequences_decode_together_whenever_their_prompts_are_done(
    serve: Serve, warm_up_steps: int
) -> None:
    async with serve(FakeLLM(prefills_alone=True)) as served:
        events = await _read(served.stub.Profile(synthetic(4, 40, num_tokens=5, warm_up_steps=warm_up_steps)))
        steps = [(event.step.num_prefill_tokens, event.step.num_decode_tokens) for event in events[2:-1]]
        assert steps == [(1, 0), (1, 1), (1, 2), (1, 3)] + [(0, 4)] * 5
        summary = events[-1].summary
        assert summary.decode_seqs == 4, "fewer are no decode step of the summary"
        assert (summary.finish_reason, summary.usage.completion_tokens) == (api.FINISH_REASON_MAX_TOKENS, 6 + 7 + 8 + 9)
        assert served.llm.num_steps == 9 * (2 if warm_up_steps else 1), "a warm-up is no longer than the profile"


async def test_synthetic_sequences_that_outgrow_the_context_end_the_profile(serve: Serve) -> None:
    """Prompts of others put the last one off for longer than could be foreseen."""
    async with serve(FakeLLM(prefills_alone=True, max_model_len=20)) as served:
        events = await _read(served.stub.Profile(synthetic(4, 14, num_tokens=5)))
        assert kinds(events[2:-1]) == ["step"] * 6
        assert events[-1].summary.finish_reason == api.FINISH_REASON_CONTEXT_FULL
        await served.until(lambda status: status.engine.num_running == 0)


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (synthetic(0, 8), {"synthetic.num_seqs"}),
        (synthetic(5, 8), {"synthetic.num_seqs"}),
        (synthetic(2**32 - 1, 2**32 - 1), {"synthetic.num_seqs", "synthetic.prompt_len"}),
        (synthetic(1, 0), {"synthetic.prompt_len"}),
        (synthetic(1, 4093), {"synthetic.prompt_len"}),
        (synthetic(2, 1000), {"synthetic"}),  # 126 of 100 blocks
        (synthetic(1, 8, num_tokens=2**31), {"num_tokens", "synthetic.prompt_len"}),
        (synthetic(1, 8, num_tokens=0), {"num_tokens"}),
        (profile(warm_up_steps=1001, unprofiled_every=1), {"warm_up_steps", "unprofiled_every"}),
        (profile(detail=9), {"detail"}),
        (profile(num_tokens=16385), {"num_tokens"}),
        (api.ProfileRequest(live=api.LiveTraffic(num_steps=0)), {"live.num_steps"}),
        (api.ProfileRequest(live=api.LiveTraffic(num_steps=16385), num_tokens=3), {"live.num_steps", "num_tokens"}),
    ],
)
async def test_absurd_profiles_name_their_fields(serve: Serve, request_: api.ProfileRequest, fields: set[str]) -> None:
    async with serve() as served:
        error = await failure_of(served.stub.Profile(request_))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert {violation.field for violation in details_of(error)["BadRequest"].field_violations} == fields
        assert not served.session.profiles, "nothing was started"


async def test_a_full_queue_takes_none_of_the_sequences(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True, max_waiting=1)) as served:
        live = [served.stub.Generate(generate(max_tokens=60)) for _ in range(2)]
        await served.step_until(lambda status: status.engine.num_running == 2)
        refused = asyncio.ensure_future(failure_of(served.stub.Profile(synthetic(4, 8))))
        await served.step_until(lambda status: status.counters.rejected == 1)
        assert (await refused).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = await served.until(lambda status: not status.profiling)
        assert status.engine.num_running + status.engine.num_waiting == 2
        assert not served.session.profile_is_on
        served.llm.open_gate()
        for call in live:
            await _read(call)


async def test_a_warm_up_is_run_and_not_reported(serve: Serve) -> None:
    async with serve() as served:
        events = await _read(served.stub.Profile(profile(warm_up_steps=2, fusion=False)))
        assert kinds(events) == ["device", "model", *["step"] * 4, "summary"]
        assert [event.step.index for event in events[2:-1]] == [0, 1, 2, 3]
        assert "".join(event.step.text for event in events[2:-1]) == "abab"
        assert events[-1].summary.usage.completion_tokens == 4
        assert served.llm.num_steps == 2 + 4
        warm_up, prompt = served.llm.seen_prompts
        assert (len(warm_up), prompt) == (2, list(b"ab"))
        assert served.session.profiles == [False, False], "it warms up what is measured then"
        assert served.session.num_unfinished_at_start == [0, 0], "what warmed up is gone before the profile begins"


async def test_a_warm_up_ends_with_its_requests(serve: Serve) -> None:
    async with serve() as served:
        events = await _read(served.stub.Profile(profile(warm_up_steps=1000, num_tokens=3)))
        assert (len(events), served.llm.num_steps) == (6, 6)


async def test_an_aborted_warm_up_reports_nothing_of_it(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        running = served.stub.Profile(profile(request_id="p", warm_up_steps=50, num_tokens=60))
        await served.step_until(lambda status: status.engine.num_running == 1)
        abort = asyncio.ensure_future(served.stub.Abort(api.AbortRequest(request_id="p")))
        await served.step_until(lambda status: status.engine.num_running == 0)
        events = await _read(running)
        assert kinds(events) == ["device", "model", "summary"]
        assert events[-1].summary.finish_reason == api.FINISH_REASON_ABORTED
        assert events[-1].summary.usage == (await abort).usage == api.Usage()
        assert not served.session.profile_is_on


async def test_live_traffic_is_watched_and_nothing_is_added(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        live = served.stub.Generate(generate(max_tokens=8))
        await live.read()
        watching = served.stub.Profile(api.ProfileRequest(live=api.LiveTraffic(num_steps=3), warm_up_steps=2))
        await served.until(lambda status: status.profiling)
        served.llm.open_gate()
        events = await _read(watching)
        assert kinds(events) == ["device", "model", *["step"] * 3, "summary"]
        assert [event.step.num_seqs for event in events[2:-1]] == [1] * 3
        assert events[-1].summary.finish_reason == api.FINISH_REASON_UNSPECIFIED
        assert len(served.llm.seen_prompts) == 1
        assert "".join([event.delta.text async for event in rest_of(live)]) == "ab" * 4
        assert (await served.until(lambda status: status.counters.finished == 2)).counters.in_flight == 0


async def test_watching_waits_for_traffic_and_says_so(serve: Serve) -> None:
    async with serve() as served:
        watching = served.stub.Profile(api.ProfileRequest(request_id="w", live=api.LiveTraffic(num_steps=100)))
        first = [await watching.read() for _ in range(3)]
        assert kinds(first) == ["device", "model", "waiting"]
        assert first[2].waiting.num_steps == 0
        await _read(served.stub.Generate(generate(max_tokens=2)))
        again = [await watching.read() for _ in range(3)]
        assert kinds(again) == ["step", "step", "waiting"]
        assert again[2].waiting.num_steps == 2

        error = await failure_of(served.stub.Profile(profile()))
        assert details_of(error)["ErrorInfo"].reason == "PROFILE_BUSY"
        assert error.details() == "a profile is running, and there is one at a time"
        assert (await served.stub.Abort(api.AbortRequest(request_id="w"))).usage == api.Usage()
        [last] = await _all(rest_of(watching))
        assert last.summary.finish_reason == api.FINISH_REASON_ABORTED
        await served.until(lambda status: not status.profiling)
        assert not served.session.profile_is_on


async def _all(events: Any) -> list[Any]:
    return [event async for event in events]


async def test_a_cancelled_watch_frees_its_place(serve: Serve) -> None:
    async with serve() as served:
        watching = served.stub.Profile(api.ProfileRequest(live=api.LiveTraffic()))
        await watching.read()
        watching.cancel()
        await served.until(lambda status: not status.profiling and status.counters.cancelled == 1)
        assert (await _read(served.stub.Profile(profile())))[-1].HasField("summary")


async def test_draining_ends_a_watch_and_not_what_it_watches(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        live = served.stub.Generate(generate(max_tokens=6))
        await live.read()
        watching = served.stub.Profile(api.ProfileRequest(live=api.LiveTraffic()))
        await served.until(lambda status: status.profiling)
        served.server.closing.set()
        served.llm.open_gate()
        assert (await _all(rest_of(watching)))[-1].summary.finish_reason == api.FINISH_REASON_ABORTED
        assert "".join([event.delta.text async for event in rest_of(live)]) == "ababab"


async def test_ids_of_clients_and_of_profiled_sequences_are_apart(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        live = served.stub.Generate(generate(request_id="p0", max_tokens=6))
        await live.read()
        running = served.stub.Profile(synthetic(2, 8, request_id="p"))
        await served.step_until(lambda status: status.engine.num_running == 3)
        served.llm.open_gate()
        assert (await _read(running))[-1].summary.usage.completion_tokens == 8
        assert "".join([event.delta.text async for event in rest_of(live)]) == "ababab"


@pytest.mark.parametrize("steps_ahead", [1, 64])
async def test_a_stream_that_leaves_when_steps_were_launched_ahead(serve: Serve, steps_ahead: int) -> None:
    """They are done when the profile starts; what they gave comes after the end of the request."""
    async with serve(FakeLLM(gated=True)) as served:
        served.session.steps_ahead_of_a_profile = steps_ahead
        leaving = served.stub.Generate(generate(max_tokens=50))
        staying = served.stub.Generate(generate(max_tokens=200))
        await served.step_until(lambda status: status.engine.num_running == 2)
        running = served.stub.Profile(profile())
        await served.until(lambda status: status.profiling)
        leaving.cancel()
        await served.until(lambda status: status.counters.cancelled == 1)
        served.llm.open_gate()
        assert (await _read(running))[-1].HasField("summary")
        assert "".join([event.delta.text async for event in staying]) == "ab" * 100
        assert (await served.status()).state == api.SERVER_STATE_READY


# ---- detail --------------------------------------------------------------------------------------------------------


async def test_the_summary_alone(serve: Serve) -> None:
    async with serve() as served:
        events = await _read(served.stub.Profile(profile(detail=api.PROFILE_DETAIL_SUMMARY)))
        assert kinds(events) == ["device", "model", "summary"]
        assert events[-1].summary.num_decode_steps == 3


async def test_a_timeline_has_every_call(serve: Serve) -> None:
    async with serve() as served:
        events = await _read(served.stub.Profile(profile(detail=api.PROFILE_DETAIL_TIMELINE)))
        first, second = events[3].step.calls
        assert (first.name, first.layer, first.start_s, first.time_s) == ("linear", 7, 0, 0.125)
        assert (first.num_launches, first.num_bytes, first.flops) == (2, 660, 2000)
        assert not second.HasField("layer"), "it is outside the layers"
        assert second.start_s == 0.25
        assert events[3].step.ops, "the sums are there as well"


async def test_a_message_of_a_huge_timeline_stays_below_4_mib(serve: Serve) -> None:
    options = (("grpc.max_receive_message_length", 4 * 2**20),)
    async with serve(channel_options=options, max_pending_bytes=3 * 2**20) as served:
        served.session.timeline_calls = 100_000
        request = profile(detail=api.PROFILE_DETAIL_TIMELINE, num_tokens=1)
        step = (await _read(served.stub.Profile(request)))[2].step
        assert (len(step.calls), step.calls_left_out) == (16384, 100_000 - 16384)
        assert step.ByteSize() < 2 * 2**20


async def test_what_a_simulated_device_counted(serve: Serve) -> None:
    counted = CountedTraffic(
        num_launches=6,
        dram=KindBytes(weights=1, kv=2, activations=3, scratch=4),
        l2=KindBytes(weights=32),
        lanes=KindBytes(kv=64),
        shared_bytes=5,
        shared_wavefronts=7,
        shared_wavefronts_ideal=6,
        warp_instructions=8,
        lane_instructions=256,
    )
    async with serve() as served:
        served.session.time_source, served.session.counted = TimeSource.SIMULATED, counted
        events = await _read(served.stub.Profile(profile()))
        assert events[0].device.time_source == api.TIME_SOURCE_SIMULATED
        counted = events[2].step.ops[0].counted
        assert (counted.dram.weights, counted.dram.kv, counted.dram.activations, counted.dram.scratch) == (1, 2, 3, 4)
        assert (counted.l2.weights, counted.l2.kv, counted.lanes.kv, counted.shared_bytes) == (32, 0, 64, 5)
        assert (counted.shared_wavefronts, counted.shared_wavefronts_ideal) == (7, 6)
        assert (counted.warp_instructions, counted.lane_instructions) == (8, 256)


async def test_steps_without_a_profile_say_so(serve: Serve) -> None:
    async with serve() as served:
        events = await _read(served.stub.Profile(profile(unprofiled_every=2, num_tokens=5)))
        assert [event.step.unprofiled for event in events[2:-1]] == [True, False, True, False, True]


async def test_a_summary_that_fails_fails_its_profile_alone(serve: Serve) -> None:
    async with serve(FakeLLM(gated=True)) as served:
        live = served.stub.Generate(generate(max_tokens=6))
        await live.read()
        running = served.stub.Profile(profile(num_tokens=2))
        await served.step_until(lambda status: status.engine.num_running == 2)
        served.session.fail_in_stop = ZeroDivisionError("a bug")
        served.llm.open_gate()
        assert (await failure_of(running)).code() is grpc.StatusCode.INTERNAL
        assert "".join([event.delta.text async for event in rest_of(live)]) == "ababab"
        served.session.fail_in_stop = None
        assert (await _read(served.stub.Profile(profile())))[-1].HasField("summary")


async def test_profile_can_be_turned_off(serve: Serve) -> None:
    async with serve(profile="off") as served:
        error = await failure_of(served.stub.Profile(profile()))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert details_of(error)["ErrorInfo"].reason == "PROFILE_OFF"
        assert "--profile off" in error.details()
        assert (await _read(served.stub.Generate(generate(max_tokens=1))))[-1].HasField("finished")


async def test_a_profile_that_waits_for_traffic_gives_its_place_up(serve: Serve) -> None:
    async with serve(max_profile_s=0.2) as served:
        watching = await _read(served.stub.Profile(api.ProfileRequest(live=api.LiveTraffic(num_steps=100))))
        assert kinds(watching) == ["device", "model", "waiting", "summary"]
        assert watching[-1].summary.finish_reason == api.FINISH_REASON_ABORTED
        assert (await _read(served.stub.Profile(profile(num_tokens=1))))[-1].HasField("summary")


async def test_a_profile_slows_neighbours_down_for_a_limited_time(serve: Serve) -> None:
    llm = FakeLLM(step_delay_s=0.005)
    async with serve(llm, max_profile_s=0.2) as served:
        events = await _read(served.stub.Profile(profile(num_tokens=4000, warm_up_steps=10)))
        assert events[-1].summary.finish_reason == api.FINISH_REASON_ABORTED
        assert 1 <= events[-1].summary.usage.completion_tokens <= 60
        status = await served.status()
        assert (status.profiling, status.engine.num_running) == (False, 0)
