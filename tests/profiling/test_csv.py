"""A line per step and op."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from numba_engine.profiling.exports import steps_as_csv
from tests.profiling.sample_profile import COUNTED_STEPS, COUNTED_SUMMARY, STEPS


def test_a_line_per_step_and_op_with_what_was_measured_and_computed() -> None:
    text = steps_as_csv(STEPS)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["step"], row["op"]) for row in rows] == [
        *(("0", op) for op in ("linear", "attention")),
        *((str(step), op) for step in (1, 2, 3) for op in ("attention", "linear", "store_kv")),
    ]
    assert [row["phase"] for row in rows] == ["prefill"] * 2 + ["decode"] * 9
    linear = rows[3]
    assert (linear["num_calls"], linear["weight_bytes"], linear["activation_written_bytes"]) == (
        "61",
        "90000000",
        "100000",
    )
    assert float(linear["share_of_step"]) == pytest.approx(6.0 / 10.3)
    assert float(linear["gbps"]) == pytest.approx(90.3 / 6)
    assert float(linear["gflops"]) == pytest.approx(30.1)
    assert float(linear["intensity"]) == pytest.approx(2.0)
    assert float(linear["step_host_time_s"]) == pytest.approx(0.0008)
    assert float(rows[-1]["step_time_s"]) == 0.0125
    assert len({line.count(",") for line in text.splitlines()}) == 1


def test_times_survive_exactly() -> None:
    times = [float(row["time_s"]) for row in csv.DictReader(io.StringIO(steps_as_csv(STEPS)))]
    assert times == [op.time_s for step in STEPS for op in step.ops]


def test_what_was_counted_has_columns_of_its_own() -> None:
    rows = list(csv.DictReader(io.StringIO(steps_as_csv(COUNTED_STEPS, COUNTED_SUMMARY.peaks))))
    decode = rows[1]
    assert (decode["time_source"], decode["profiled"], decode["num_launches"]) == ("SIMULATED", "1", "61")
    assert decode["counted_dram_weights_bytes"] == "90000000"
    assert decode["counted_dram_activations_bytes"] == "400000"
    assert decode["counted_l2_scratch_bytes"] == "20"
    assert decode["counted_lanes_activations_bytes"] == "7000000"
    assert (decode["counted_shared_bytes"], decode["counted_warp_instructions"]) == ("40000000", "5000000")
    assert decode["bound"] == "LATENCY"
    assert float(decode["share_of_attainable"]) == pytest.approx(90.3e6 / 4.8e12 / 0.006)


def test_a_step_without_looking_has_a_line_too() -> None:
    steps = [STEPS[1], replace(STEPS[2], profiled=False, ops=(), overhead_s=0.0)]
    rows = list(csv.DictReader(io.StringIO(steps_as_csv(steps))))
    assert [(row["step"], row["profiled"], row["op"]) for row in rows] == [
        *(("1", "1", op) for op in ("attention", "linear", "store_kv")),
        ("2", "0", ""),
    ]
    assert float(rows[-1]["step_time_s"]) == 0.0105
