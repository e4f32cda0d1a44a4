"""Profiles, benches and estimates as plain JSON values, keyed by the field names of their dataclasses; steps as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from numba_engine.outputs import ModelInfo
from numba_engine.profiling.bench import BenchRow
from numba_engine.profiling.phases import phase_of
from numba_engine.profiling.report import OpProfile, Peaks, ProfileSummary, StepProfile
from numba_engine.profiling.roofline import Estimate

Json = dict[str, Any]


def profile_as_json(model: ModelInfo, steps: Sequence[StepProfile], summary: ProfileSummary) -> Json:
    """A whole profile: ``{"model", "steps", "summary"}``."""
    return {
        "model": asdict(model),
        "steps": [step_as_json(step, summary.peaks) for step in steps],
        "summary": summary_as_json(summary),
    }


def step_as_json(step: StepProfile, peaks: Peaks | None = None) -> Json:
    """With the peaks at hand, also how much of what they allow each op reached, and what holds it up."""
    derived: Json = {"host_time_s": step.host_time_s, "ops": [_op_as_json(op, peaks) for op in step.ops]}
    if peaks is not None:
        derived["arithmetic_idle_share"] = step.arithmetic_idle_share(peaks)
    return asdict(step) | derived


def summary_as_json(summary: ProfileSummary) -> Json:
    return asdict(summary) | {
        "ops": [_op_as_json(op, summary.peaks) for op in summary.ops],
        "shares": dict(summary.shares),
        "prefill_ops": [_op_as_json(op, summary.peaks) for op in summary.prefill_ops],
        "prefill_shares": dict(summary.prefill_shares),
    }


def steps_as_csv(steps: Sequence[StepProfile], peaks: Peaks | None = None) -> str:
    """A line per step and op under one of column names. ``step_…`` is the whole step's and the same in all its lines.

    Times are in seconds, taken as ``time_source`` says; bytes and FLOPs are by formula, but for ``counted_…``, which
    are the executor's and empty where there is none. A step that was not profiled has one line, without an op.
    """
    rows = [_step_columns(step) | columns for step in steps for columns in _columns_of_ops(step, peaks)]
    out = io.StringIO()
    writer = csv.DictWriter(out, max(rows, key=len) if rows else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def bench_as_json(model: ModelInfo, rows: Sequence[BenchRow]) -> Json:
    """A whole bench: ``{"model", "rows"}``."""
    return {
        "model": asdict(model),
        "rows": [asdict(row) | {"share_of_bandwidth": row.share_of_bandwidth} for row in rows],
    }


def estimate_as_json(estimate: Estimate) -> Json:
    """Every field and derived figure of an estimate."""
    return _with_properties(estimate) | {"basis": "by formula from the datasheet; energy figures are estimates"}


def _with_properties(value: Any) -> Any:
    """Dataclasses, however deep, become objects of their fields and properties."""
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: _with_properties(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [_with_properties(item) for item in value]
    return value


def _op_as_json(op: OpProfile, peaks: Peaks | None) -> Json:
    derived: Json = {"total_bytes": op.total_bytes, "gbps": op.gbps, "gflops": op.gflops, "intensity": op.intensity}
    if peaks is not None:
        derived |= {"share_of_attainable": op.share_of_attainable(peaks), "bound": op.bound(peaks).value}
    return asdict(op) | derived


def _step_columns(step: StepProfile) -> Json:
    return {
        "step": step.index,
        "phase": phase_of(step),
        "num_prefill_tokens": step.num_prefill_tokens,
        "num_decode_tokens": step.num_decode_tokens,
        "num_seqs": step.num_seqs,
        "profiled": int(step.profiled),
        "time_source": step.time_source.value,
        "step_time_s": step.time_s,
        "step_overhead_s": step.overhead_s,
        "step_host_time_s": step.host_time_s,
        "step_launch_gap_s": step.launch_gap_s,
    }


def _columns_of_ops(step: StepProfile, peaks: Peaks | None) -> list[Json]:
    return [_op_columns(step, op, peaks) for op in step.ops] or [{}]


def _op_columns(step: StepProfile, op: OpProfile, peaks: Peaks | None) -> Json:
    values = _op_as_json(op, peaks)
    del values["counted"]
    share = op.time_s / step.net_time_s if step.net_time_s else 0.0
    return {"op": values.pop("name"), "share_of_step": share} | values | _counted_columns(op)


def _counted_columns(op: OpProfile) -> Json:
    if op.counted is None:
        return {}
    columns: Json = {}
    for name, value in asdict(op.counted).items():
        if isinstance(value, dict):
            columns |= {f"counted_{name}_{kind}_bytes": nbytes for kind, nbytes in value.items()}
        else:
            columns[f"counted_{name}"] = value
    return columns
