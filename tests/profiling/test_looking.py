"""How the recorder looks: when ops begin and end, which steps go unprofiled, whose clock it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from numba_engine.backends.arrays import Norm
from numba_engine.backends.instruments import CountedTraffic, KindBytes, OpTime, TimeSource
from numba_engine.backends.sampling import Sampled
from numba_engine.profiling.recorder import Recorder, summarize
from numba_engine.profiling.report import MemoryUse, OpBound, OpProfile, StepProfile, sum_ops
from tests.profiling.idle_backend import CountedModel, FakeClock, FusingBackend, IdleBackend
from tests.profiling.sample_profile import LINEAR, peaks

X = np.zeros((1, 4), np.float32)


class Timer:
    """Ops take a microsecond each on this device, and have two microseconds between them and two launches each."""

    source = TimeSource.CUPTI

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self) -> None:
        self.events.append("start")

    def begin(self) -> None:
        self.events.append("begin")

    def end(self) -> None:
        self.events.append("end")

    def take(self) -> list[OpTime]:
        count = self.events.count("end")
        self.events.clear()
        return [OpTime(3e-6 * place, 1e-6, 2) for place in range(count)]

    def stop(self) -> None:
        self.events.append("stop")


class Counter:
    """Has counted as many bytes of activations as there are arrays of them."""

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def take(self, arrays: dict[str, list[object]]) -> CountedTraffic:
        kinds = {kind: len(listed) for kind, listed in arrays.items()}
        return CountedTraffic(num_launches=3, dram=KindBytes(**kinds))


def take(recorder: Recorder, time_s: float = 1.0) -> StepProfile:
    return recorder.take_step(index=0, num_prefill_tokens=0, num_decode_tokens=1, num_seqs=1, time_s=time_s)


# ---- the host's clock ------------------------------------------------------------------------------------------------


def test_calling_an_op_is_part_of_it_but_not_what_the_host_does_before_a_forward_or_a_draw(clock: FakeClock) -> None:
    recorder = Recorder(IdleBackend(clock, op_s=0.5), timeline=True, clock=clock)
    began_s = clock.now
    clock.now += 4.0  # scheduling
    recorder.rms_norm(X, X, Norm(X[0], 1e-5))
    clock.now += 0.25
    recorder.gated_activation(X[:, :2], X, "silu")
    clock.now += 0.125
    recorder.gather_rows(X, X, X[0])
    clock.now += 2.0  # sampling parameters
    recorder.sample(Sampled(X[0]), X, None)  # type: ignore[arg-type]
    clock.now += 1.0  # text
    step = take(recorder, clock.now - began_s)
    assert {op.name: op.time_s for op in step.ops} == {
        "rms_norm": 0.5,
        "gated_activation": 0.75,
        "gather_rows": 0.625,
        "sample": 0.5,
    }
    assert step.launch_gap_s == 0.375
    assert step.host_time_s == 4.0 + 2.0 + 1.0
    assert [(call.name, call.start_s, call.time_s) for call in step.timeline] == [
        ("rms_norm", 4.0, 0.5),
        ("gated_activation", 4.5, 0.75),
        ("gather_rows", 5.25, 0.625),
        ("sample", 7.875, 0.5),
    ]
    assert step.num_launches == 4


def test_a_timeline_has_every_call_with_its_layer_and_only_where_it_is_wanted(
    clock: FakeClock, model: CountedModel
) -> None:
    recorder = Recorder(FusingBackend(clock), timeline=True, clock=clock)
    for _ in range(2):  # the layers are counted anew in each step
        model.forward(recorder, model.batch([1], [5]))
        step = take(recorder)
        layer = [
            "norm_qkv_rope_store",
            "attention",
            "linear_add",
            "rms_norm",
            "linear",
            "gated_activation",
            "linear_add",
        ]
        expected = [("embedding", None), *((name, i) for i in (0, 1) for name in layer), ("norm_lm_head", None)]
        assert [(call.name, call.layer) for call in step.timeline] == expected
        assert sum(call.num_bytes for call in step.timeline) == sum(op.total_bytes for op in step.ops)
        assert sum(call.flops for call in step.timeline) == sum(op.flops for op in step.ops)
    without = Recorder(FusingBackend(clock), clock=clock)
    model.forward(without, model.batch([1], [5]))
    assert take(without).timeline == ()


@pytest.mark.parametrize("fusion", [True, False])
def test_every_nth_decode_step_runs_unseen(clock: FakeClock, model: CountedModel, fusion: bool) -> None:
    inner = FusingBackend(clock)
    recorder = Recorder(inner, fusion=fusion, unprofiled_every=3, clock=clock)
    seen = []
    for is_decode in (False, True, True, False, True, True, True, True):
        ops = recorder.ops_for_step(is_decode=is_decode)
        inner.ran.clear()
        model.forward(ops, model.batch([1], [5]))
        step = take(recorder, time_s=0.125)
        seen.append(step.profiled)
        assert bool(step.ops) == step.profiled
        assert ("norm_qkv_rope_store" in inner.ran) == fusion, "the same ops run, looked at or not"
        assert step.time_s == 0.125
        assert (step.host_time_s > 0) == step.profiled
        if not step.profiled and fusion:
            assert ops is inner
    assert seen == [True, True, True, True, False, True, True, False]


# ---- the device's own ------------------------------------------------------------------------------------------------


def test_a_device_s_timer_takes_the_times_and_the_host_does_not_wait(
    clock: FakeClock, model: CountedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = IdleBackend(clock, op_s=0.5)
    inner.timer = timer = Timer()
    monkeypatch.setattr(inner, "synchronize", lambda: pytest.fail("a wait between ops shows in none of their times"))
    recorder = Recorder(inner, timeline=True, clock=clock)
    assert timer.events == ["start"]
    clock.now += 1.0
    recorder.rms_norm(X, X, Norm(X[0], 1e-5))
    recorder.gated_activation(X[:, :2], X, "silu")
    assert timer.events == ["start", *["begin", "end"] * 2]
    step = take(recorder, time_s=2.0)  # half a second of scheduling; a second in the ops, by the host's clock
    assert step.time_source is TimeSource.CUPTI
    assert [(op.name, op.time_s, op.num_launches) for op in step.ops] == [
        ("rms_norm", 1e-6, 2),
        ("gated_activation", 1e-6, 2),
    ]
    assert step.launch_gap_s == pytest.approx(2e-6)
    assert (step.overhead_s, step.host_time_s) == (0, pytest.approx(2.0 - 2e-6))
    assert [call.start_s for call in step.timeline] == pytest.approx([1.0, 1.0 + 3e-6])
    recorder.close()
    assert timer.events == ["stop"]


def test_a_device_that_counts_is_simulated_and_its_times_are_predictions(clock: FakeClock, model: CountedModel) -> None:
    inner = IdleBackend(clock, op_s=0.5)
    inner.counter = Counter()  # type: ignore[assignment]
    recorder = Recorder(inner, unprofiled_every=1, clock=clock)
    model.forward(recorder.ops_for_step(is_decode=True), model.batch([1], [5]))
    step = take(recorder, time_s=77.0)
    assert (step.time_source, step.profiled) == (TimeSource.SIMULATED, True)
    ops = {op.name: op for op in step.ops}
    linear_add = ops["linear_add"]
    assert linear_add.counted == CountedTraffic(12, KindBytes(weights=4, activations=8))  # 4 calls of 3 arrays
    assert linear_add.time_s == pytest.approx(12 * 1.3e-6 + linear_add.weight_bytes / 4.8e12)
    attention = ops["attention"]
    assert attention.counted is not None
    assert attention.counted.dram.kv == 2 * 2  # k and v, twice
    assert ops["head_norm"].counted == CountedTraffic(6, KindBytes(weights=4, activations=6))  # cos and sin too
    assert step.time_s == step.ops_time_s
    assert (step.overhead_s, step.host_time_s, step.launch_gap_s) == (0, 0, pytest.approx(0, abs=1e-12))


# ---- what follows from the numbers -----------------------------------------------------------------------------------


def op(time_s: float, weight_bytes: int, flops: int) -> OpProfile:
    return OpProfile("linear", 1, time_s, weight_bytes, 0, 0, flops)


@pytest.mark.parametrize(
    ("time_s", "weight_bytes", "flops", "share", "bound"),
    [
        (0.1, 1_000_000_000, 10, 1.0, OpBound.MEMORY),  # 10 GB/s of 10
        (0.16, 1_000_000_000, 10, 0.625, OpBound.MEMORY),
        (0.17, 1_000_000_000, 10, 0.588, OpBound.LATENCY),
        (0.1, 1_000_000, 38_000_000_000, 0.95, OpBound.COMPUTE),  # 380 GFLOP/s of 400
        (1.0, 1_000_000, 38_000_000_000, 0.095, OpBound.LATENCY),
        (0.05, 1_000_000_000, 10, 2.0, OpBound.MEMORY),  # from a cache
    ],
)
def test_bounds(time_s: float, weight_bytes: int, flops: int, share: float, bound: OpBound) -> None:
    one = op(time_s, weight_bytes, flops)
    assert one.share_of_attainable(peaks(10.0, 400.0)) == pytest.approx(share, rel=1e-3)
    assert one.bound(peaks(10.0, 400.0)) is bound


def test_without_an_arithmetic_peak_memory_alone_bounds() -> None:
    one = op(0.1, 1_000_000_000, 10**12)
    assert (one.bound(peaks(10.0)), one.arithmetic_idle_share(peaks(10.0))) == (OpBound.MEMORY, None)
    assert one.arithmetic_idle_share(peaks(10.0, 100_000.0)) == pytest.approx(0.9)


def test_sums_keep_what_was_counted() -> None:
    counted = CountedTraffic(2, KindBytes(5, 6, 7, 8), KindBytes(9), KindBytes(10), 11, 12, 13, 14, 15)
    ops = [replace(LINEAR, counted=counted), LINEAR, replace(LINEAR, counted=counted, num_launches=3)]
    total = sum_ops("both", ops)
    assert (total.num_calls, total.num_launches, total.flops) == (183, 3, 3 * LINEAR.flops)
    assert total.counted == CountedTraffic(
        4, KindBytes(10, 12, 14, 16), KindBytes(18), KindBytes(20), 22, 24, 26, 28, 30
    )
    assert sum_ops("none", [LINEAR]).counted is None
    assert counted.register_bytes == 10 + 11


def test_a_summary_compares_with_unprofiled_steps_of_as_many_sequences() -> None:
    def step(index: int, time_s: float, num_seqs: int = 1, *, profiled: bool = True) -> StepProfile:
        ops = (op(time_s - 0.002, 10_000_000, 400_000_000),) if profiled else ()
        gap_s = 0.0005 if profiled else 0.0
        return StepProfile(
            index, 0, num_seqs, num_seqs, time_s, ops, 0.001 if profiled else 0.0, launch_gap_s=gap_s, profiled=profiled
        )

    steps = [
        *(step(i, 0.010 + 0.001 * i) for i in range(11)),
        step(11, 0.5, num_seqs=8),
        step(12, 0.012, profiled=False),
        step(13, 0.014, profiled=False),
    ]
    memory = MemoryUse(1, 2, 3, 4, 5)
    summary = summarize(steps, peaks=peaks(10.0, 400.0), memory=memory)
    assert (summary.num_decode_steps, summary.num_unprofiled_steps) == (12, 2)
    assert summary.unprofiled_step_s == pytest.approx(0.013)
    assert summary.profiled_step_s == pytest.approx(0.015)
    assert summary.profiled_ops_s == pytest.approx(0.013)
    assert summary.memory is memory
    assert summary.launch_gap_s_per_step == pytest.approx(0.0005)
    assert summary.host_s_per_step == pytest.approx(0.001)
    alone = summarize(steps[:11], peaks=peaks(10.0, 400.0))
    rates = [1 / (0.009 + 0.001 * i) for i in range(11)]
    assert alone.decode_tokens_per_s == pytest.approx(rates[5])
    assert (alone.decode_tokens_per_s_p10, alone.decode_tokens_per_s_p90) == pytest.approx((rates[9], rates[1]))
    busy = 11 * 400e6 / sum(0.009 + 0.001 * i for i in range(11)) / 400e9
    assert alone.decode_arithmetic_idle_share == pytest.approx(1 - busy)
    assert (alone.unprofiled_step_s, alone.profiled_step_s) == (0, 0)
