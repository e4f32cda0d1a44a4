"""The recorder: what it names, times and counts, and what a summary makes of it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from numba_engine.profiling.phases import phase_profiles
from numba_engine.profiling.recorder import Recorder, summarize
from numba_engine.profiling.report import OpProfile, StepProfile
from tests.profiling.idle_backend import CountedModel, FakeClock, FusingBackend, IdleBackend
from tests.profiling.sample_profile import peaks

TEXTBOOK = {
    "embedding": 1,
    "rms_norm": 2 * 2 + 1,
    "linear": 2 * 2 + 1,
    "head_norm": 2,
    "rope": 2,
    "store_kv": 2,
    "attention": 2,
    "linear_add": 4,
    "gated_activation": 2,
    "gather_rows": 1,
}


def take(recorder: Recorder, time_s: float = 1.0) -> StepProfile:
    return recorder.take_step(index=3, num_prefill_tokens=0, num_decode_tokens=1, num_seqs=1, time_s=time_s)


def test_records_the_textbook_where_the_backend_fuses_nothing(clock: FakeClock, model: CountedModel) -> None:
    recorder = Recorder(IdleBackend(clock, op_s=0.25), clock=clock)
    model.forward(recorder, model.batch([1], [5]))
    step = take(recorder)
    assert {op.name: op.num_calls for op in step.ops} == TEXTBOOK
    assert {op.name: op.time_s for op in step.ops} == {name: 0.25 * calls for name, calls in TEXTBOOK.items()}
    assert [op.name for op in step.ops][:3] == ["embedding", "rms_norm", "linear"]


def test_records_a_fused_phase_as_one_op(clock: FakeClock, model: CountedModel) -> None:
    recorder = Recorder(FusingBackend(clock), clock=clock)
    model.forward(recorder, model.batch([1], [5]))
    assert {op.name: op.num_calls for op in take(recorder).ops} == {
        "embedding": 1,
        "norm_qkv_rope_store": 2,
        "attention": 2,
        "linear_add": 4,
        "rms_norm": 2,  # the phase it does not fuse
        "linear": 2,
        "gated_activation": 2,
        "norm_lm_head": 1,
    }


def test_without_fusion_the_textbook_ops_really_run(clock: FakeClock, model: CountedModel) -> None:
    inner = FusingBackend(clock)
    recorder = Recorder(inner, fusion=False, clock=clock)
    model.forward(recorder, model.batch([1], [5]))
    assert {op.name: op.num_calls for op in take(recorder).ops} == TEXTBOOK
    assert "norm_qkv_rope_store" not in inner.ran
    assert "norm_lm_head" not in inner.ran


@pytest.mark.parametrize("fusion", [True, False])
def test_a_decode_step_streams_every_weight_once_and_one_embedding_row(
    clock: FakeClock, model: CountedModel, fusion: bool
) -> None:
    recorder = Recorder(FusingBackend(clock), fusion=fusion, clock=clock)
    model.forward(recorder, model.batch([1], [5]))
    ops = take(recorder).ops
    assert sum(op.weight_bytes for op in ops) == model.weight_bytes + model.embedding_row_bytes
    kv_bytes_per_token = 2 * 2 * 16 * 2 * 2  # k and v, 2 KV heads of 16 float16, 2 layers
    assert sum(op.kv_written_bytes for op in ops) == kv_bytes_per_token
    assert sum(op.kv_bytes for op in ops) == 5 * kv_bytes_per_token + kv_bytes_per_token


def test_fusion_changes_no_flops_and_saves_activation_bytes(clock: FakeClock, model: CountedModel) -> None:
    def step(fusion: bool) -> StepProfile:
        recorder = Recorder(FusingBackend(clock), fusion=fusion, clock=clock)
        model.forward(recorder, model.batch([7, 1], [7, 20]))
        return take(recorder)

    fused, textbook = step(True), step(False)
    assert sum(op.flops for op in fused.ops) == sum(op.flops for op in textbook.ops)
    assert sum(op.activation_bytes for op in fused.ops) < sum(op.activation_bytes for op in textbook.ops)


def test_a_step_starts_empty_after_the_last_one_was_taken(clock: FakeClock, model: CountedModel) -> None:
    recorder = Recorder(IdleBackend(clock), clock=clock)
    model.forward(recorder, model.batch([1], [5]))
    take(recorder)
    assert take(recorder).ops == ()


def test_overhead_is_measured_and_kept_out_of_the_ops(clock: FakeClock, model: CountedModel) -> None:
    recorder = Recorder(IdleBackend(clock))  # the real clock: an idle op takes next to nothing
    assert 0 < recorder.overhead_s_per_call < 1e-4
    start = time.perf_counter()
    model.forward(recorder, model.batch([1], [5]))
    step = take(recorder, time.perf_counter() - start)
    calls = sum(TEXTBOOK.values())
    assert step.overhead_s == pytest.approx(calls * recorder.overhead_s_per_call)
    assert step.ops_time_s + step.overhead_s + step.host_time_s <= step.time_s * 1.5
    assert step.net_time_s == pytest.approx(max(step.time_s - step.overhead_s, 0.0))


def op(name: str, time_s: float, weight_bytes: int = 0, kv_bytes: int = 0, activation_bytes: int = 0) -> OpProfile:
    return OpProfile(name, 2, time_s, weight_bytes, kv_bytes, activation_bytes, flops=10)


def decode_step(index: int, time_s: float, num_seqs: int = 2) -> StepProfile:
    ops = (op("linear", 0.03, weight_bytes=600_000_000, activation_bytes=9), op("attention", 0.01, kv_bytes=8_000_000))
    return StepProfile(index, 0, num_seqs, num_seqs, time_s, ops, overhead_s=0.01)


def test_summary_keeps_prefill_and_decode_apart() -> None:
    prefill = StepProfile(0, 30, 0, 1, 0.5, (op("linear", 0.4),), overhead_s=0.1)
    mixed = StepProfile(1, 10, 1, 2, 0.6, (op("linear", 0.5),))
    steps = [prefill, mixed, decode_step(2, 0.06), decode_step(3, 0.11), decode_step(4, 0.21)]
    summary = summarize(steps, peaks=peaks(10.0))
    assert (summary.num_prefill_steps, summary.num_decode_steps) == (2, 3)
    assert summary.prefill_tokens_per_s == pytest.approx(40 / (0.4 + 0.6))
    assert summary.decode_tokens_per_s == pytest.approx(2 / 0.1)  # the median step, without the cost of looking
    assert summary.weight_bytes_per_token == 300_000_000
    assert summary.kv_bytes_per_token == 4_000_000
    assert summary.bytes_per_token == 304_000_000
    assert summary.floor_s == pytest.approx(0.0304)
    assert summary.share_of_floor == pytest.approx(20 * 0.0304)
    assert summary.overhead_s_per_step == pytest.approx(0.01)
    assert [(o.name, o.num_calls) for o in summary.ops] == [("linear", 6), ("attention", 6)]
    host = (0.05 - 0.04) + (0.10 - 0.04) + (0.20 - 0.04)
    total = 0.09 + 0.03 + host
    assert [name for name, _ in summary.shares] == ["host", "linear", "attention"]
    assert dict(summary.shares) == pytest.approx(
        {"host": host / total, "linear": 0.09 / total, "attention": 0.03 / total}
    )


def test_a_batch_is_summed_up_without_the_steps_of_a_part_of_it() -> None:
    unprofiled = replace(decode_step(3, 0.07, num_seqs=1), profiled=False, ops=())
    part, whole = decode_step(0, 0.02, num_seqs=1), [decode_step(1, 0.06), decode_step(2, 0.06)]
    summary = summarize([part, *whole, unprofiled], peaks=peaks(10.0), decode_seqs=2)
    assert summary == replace(summarize(whole, peaks=peaks(10.0)), decode_seqs=2)
    assert summarize([part, *whole, unprofiled], peaks=peaks(10.0)).num_decode_steps == 3
    assert [phase.num_steps for phase in phase_profiles([part, *whole], 2)] == [2]


def test_summary_of_nothing_is_zero_not_an_error() -> None:
    summary = summarize([], peaks=peaks(10.0))
    assert (summary.num_decode_steps, summary.decode_tokens_per_s, summary.bytes_per_token) == (0, 0.0, 0)
    assert summary.shares == ()
    only_prefill = summarize([replace(decode_step(0, 0.1), num_prefill_tokens=5)], peaks=peaks(10.0))
    assert only_prefill.num_prefill_steps == 1
    assert only_prefill.share_of_floor == 0.0
