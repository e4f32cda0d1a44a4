"""A profile with figures that are easy to work out: two ops, one of them without arithmetic, in 1 + 3 steps."""

from __future__ import annotations

from dataclasses import replace

from numba_engine.backends.instruments import CountedTraffic, KindBytes, TimeSource
from numba_engine.profiling.peaks import simulated_peaks
from numba_engine.profiling.recorder import summarize
from numba_engine.profiling.report import OpCall, OpProfile, Peaks, ProfileSummary, StepProfile
from tests.cli.fake_llm import MODEL_INFO


def peaks(read_bandwidth_gbps: float, gflops: float | None = None) -> Peaks:
    """Of an imagined machine."""
    source = "measured" if gflops else "unknown"
    return Peaks("a machine", read_bandwidth_gbps, "measured", gflops, source, "float32 multiply-adds")


MODEL = replace(MODEL_INFO, name="<tiny> & co")

LINEAR = OpProfile("linear", 61, 0.006, 90_000_000, 0, 300_000, 180_600_000, activation_written_bytes=100_000)
ATTENTION = OpProfile("attention", 30, 0.003, 0, 3_000_000, 600_000, 7_200_000, kv_written_bytes=46_080)
STORE_KV = OpProfile("store_kv", 30, 0.0005, 0, 46_080, 92_160, 0, kv_written_bytes=46_080)

PREFILL_STEP = StepProfile(
    0, 7, 0, 1, 0.0215, (replace(LINEAR, time_s=0.015, flops=1_264_200_000), replace(ATTENTION, time_s=0.004)), 0.0005
)
DECODE_STEP = StepProfile(1, 0, 1, 1, 0.0105, (ATTENTION, LINEAR, STORE_KV), 0.0002)
"""0.8 ms of it are the host's."""

STEPS = (PREFILL_STEP, DECODE_STEP, replace(DECODE_STEP, index=2), replace(DECODE_STEP, index=3, time_s=0.0125))

SUMMARY: ProfileSummary = summarize(STEPS, peaks=peaks(31.0, 400.0))

COUNTED = CountedTraffic(
    num_launches=61,
    dram=KindBytes(90_000_000, 0, 400_000, 5),
    l2=KindBytes(91_000_000, 0, 7_000_000, 20),
    lanes=KindBytes(90_000_000, 0, 7_000_000, 20),
    shared_bytes=40_000_000,
    shared_wavefronts=330,
    shared_wavefronts_ideal=300,
    warp_instructions=5_000_000,
    lane_instructions=100_000_000,
)
_COUNTED_OPS = (replace(LINEAR, num_launches=61, counted=COUNTED),)
_CALLS = tuple(OpCall("linear", layer, layer * 0.002, 0.001, 1, 1_500_000, 3_000_000) for layer in range(3))

COUNTED_STEPS = tuple(
    StepProfile(
        index,
        prefill,
        1 - bool(prefill),
        1,
        0.006,
        _COUNTED_OPS,
        time_source=TimeSource.SIMULATED,
        timeline=_CALLS,
    )
    for index, prefill in enumerate((7, 0))
)
"""Of a simulated GPU: a step of prefill and one of decode, one op, three calls."""

COUNTED_SUMMARY: ProfileSummary = summarize(COUNTED_STEPS, peaks=simulated_peaks())
