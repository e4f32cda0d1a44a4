"""What a profile looks like on a terminal and in JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from numba_engine.backends.instruments import TimeSource
from numba_engine.profiling.exports import step_as_json, summary_as_json
from numba_engine.profiling.peaks import simulated_peaks
from numba_engine.profiling.recorder import summarize
from numba_engine.profiling.report import OpProfile, StepProfile
from numba_engine.profiling.tables import (
    format_bytes,
    format_count,
    format_time,
    step_table,
    summary_table,
)
from tests.profiling.sample_profile import COUNTED, peaks

LINEAR = OpProfile("linear", 61, 0.006, 90_000_000, 0, 300_000, 180_000_000)
ATTENTION = OpProfile("attention", 30, 0.002, 0, 10_000_000, 70_000, 50_000, kv_written_bytes=4)
STEP = StepProfile(4, 0, 1, 1, 0.0105, (ATTENTION, LINEAR), overhead_s=0.0005)


def rendered(table: RenderableType) -> list[str]:
    console = Console(width=120, no_color=True, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def row(lines: list[str], name: str) -> str:
    return " ".join(next(line for line in lines if line.startswith(name)).split())


def test_step_table_shows_time_bytes_and_share_of_bandwidth() -> None:
    lines = rendered(step_table(STEP, peaks=peaks(30.0, 60.0)))
    assert lines[0].strip() == "step 4: 1 generated, 1 sequence, 10.00 ms"
    linear = row(lines, "linear")
    for cell in ("61", "6.00 ms", "60.0%", "90.3 MB", "180.0 M", "15.1", "50%", "latency"):
        assert cell in linear
    assert "2.00 ms" in row(lines, "host")  # 10.5 - 0.5 of looking - 8 of ops
    assert [line.split()[0] for line in lines if "ms" in line][1:4] == ["linear", "attention", "host"]


def test_step_table_without_peaks_leaves_out_what_they_bound() -> None:
    assert not any("of roof" in line or "latency" in line for line in rendered(step_table(STEP)))


def test_a_step_without_looking_is_one_line() -> None:
    (line,) = rendered(step_table(replace(STEP, profiled=False, ops=(), overhead_s=0.0)))
    assert line.strip() == "step 4: 1 generated, 1 sequence, 10.50 ms, not profiled"


def test_summary_table_ends_in_the_floor_and_the_share_of_it() -> None:
    lines = rendered(summary_table(summarize([STEP, STEP], peaks=peaks(30.0))))
    assert "122" in row(lines, "linear")
    assert "100.0 tok/s" in row(lines, "decode")
    assert "100.0 MB" in row(lines, "bytes a token")
    assert "3.33 ms 300.0 tok/s" in row(lines, "floor")
    assert "33% of that limit" in row(lines, "reached")
    assert "4.00 ms" in row(lines, "host")


def test_summary_says_what_was_measured_against_what() -> None:
    unprofiled = replace(STEP, index=6, time_s=0.0099, profiled=False, ops=(), overhead_s=0.0)
    lines = rendered(summary_table(summarize([STEP, replace(STEP, index=5), unprofiled], peaks=peaks(30.0, 60.0))))
    assert "2 decode steps" in lines[0]
    measured_here = "arithmetic peak 60 GFLOP/s float32 multiply-adds, measured here, same threads"
    assert row(lines, "arithmetic peak") == measured_here
    idle = 1 - 180_050_000 / (0.010 * 60e9)
    assert row(lines, "arithmetic idle").startswith(f"arithmetic idle {idle:.1%}")
    assert (
        row(lines, "without looking") == "without looking 9.90 ms median of 1 decode step among these; 10.50 ms with it"
    )


def test_summary_of_a_simulated_gpu_shows_both_columns_and_no_clock() -> None:
    ops = (replace(LINEAR, counted=COUNTED, num_launches=61),)
    step = replace(STEP, ops=ops, time_s=0.006, overhead_s=0.0, time_source=TimeSource.SIMULATED)
    lines = rendered(summary_table(summarize([step, replace(step, index=5)], peaks=simulated_peaks())))
    assert "2 decode steps, times predicted" in lines[0]
    assert "180.6 MB 180.8 MB 360.0 M" in row(lines, "linear")  # of both steps, by formula and counted
    assert row(lines, "device memory") == "device memory 90.0 MB 90.0 MB 90.0 MB 0 B 0 B 0 B"
    assert row(lines, "L2 cache") == "L2 cache 90.3 MB 98.0 MB 91.0 MB 0 B 7.0 MB 20 B"
    assert row(lines, "shared memory") == "shared memory 0 B 40.0 MB 0 B 0 B 0 B 40.0 MB"
    assert row(lines, "registers") == "registers 90.3 MB 137.0 MB 90.0 MB 0 B 7.0 MB 40.0 MB"
    assert any("5.0 M warp instructions; shared-memory wavefronts over the ideal: 1.10" in line for line in lines)
    assert "NVIDIA H200 SXM" in row(lines, "predicted for")
    assert not any(line.startswith("cost of looking") for line in lines)


def test_summary_of_prefill_alone_says_so_and_no_more() -> None:
    prefill = StepProfile(0, 40, 0, 1, 0.5, (LINEAR,))
    lines = rendered(summary_table(summarize([prefill], peaks=peaks(30.0))))
    assert "1 prefill step" in lines[0]
    assert [line for line in lines if line.startswith(("decode", "floor", "bytes a token"))] == []
    assert row(lines, "prefill ") == "prefill 80.0 tok/s 1 step"


def test_json_has_the_fields_and_what_follows_from_them() -> None:
    step = json.loads(json.dumps(step_as_json(STEP)))
    assert step["ops"][1]["gbps"] == pytest.approx(15.05)
    assert step["ops"][1]["intensity"] == pytest.approx(180 / 90.3)
    assert step["ops"][0]["kv_written_bytes"] == 4
    assert step["host_time_s"] == pytest.approx(0.002)
    summary = json.loads(json.dumps(summary_as_json(summarize([STEP], peaks=peaks(30.0)))))
    assert summary["shares"]["linear"] == pytest.approx(0.6)
    assert summary["ops"][0]["name"] == "attention"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_time(2.5), "2.50 s"),
        (format_time(0.001), "1.00 ms"),
        (format_time(3.21e-6), "3.2 µs"),
        (format_bytes(999), "999 B"),
        (format_bytes(98_362_432), "98.4 MB"),
        (format_count(1_500_000_000_000), "1.5 T"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected
