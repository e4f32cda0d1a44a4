"""Profiles and benches as plain JSON values, keyed by the field names of ``report.py`` and ``bench.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from numba_engine.outputs import ModelInfo
from numba_engine.profiling.bench import BenchRow
from numba_engine.profiling.report import OpProfile, ProfileSummary, StepProfile

Json = dict[str, Any]


def profile_as_json(model: ModelInfo, steps: Sequence[StepProfile], summary: ProfileSummary) -> Json:
    """A whole profile: ``{"model", "steps", "summary"}``."""
    return {
        "model": asdict(model),
        "steps": [step_as_json(step) for step in steps],
        "summary": summary_as_json(summary),
    }


def step_as_json(step: StepProfile) -> Json:
    return asdict(step) | {"host_time_s": step.host_time_s, "ops": [_op_as_json(op) for op in step.ops]}


def summary_as_json(summary: ProfileSummary) -> Json:
    return asdict(summary) | {"ops": [_op_as_json(op) for op in summary.ops], "shares": dict(summary.shares)}


def bench_as_json(model: ModelInfo, rows: Sequence[BenchRow]) -> Json:
    """A whole bench: ``{"model", "rows"}``."""
    return {
        "model": asdict(model),
        "rows": [asdict(row) | {"share_of_bandwidth": row.share_of_bandwidth} for row in rows],
    }


def _op_as_json(op: OpProfile) -> Json:
    derived = {"total_bytes": op.total_bytes, "gbps": op.gbps, "gflops": op.gflops, "intensity": op.intensity}
    return asdict(op) | derived
