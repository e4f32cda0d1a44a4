"""A profile in the Trace Event Format, which Perfetto and chrome://tracing open.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (the JSON object form; times in
microseconds). Where a step has a timeline, its calls lie where they were, and what is left between them is the host's.
Where it has none, it knows the total of each op alone: the ops lie one after the other in order of first call, and what
the host did comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from numba_engine.backends.instruments import TimeSource
from numba_engine.outputs import ModelInfo
from numba_engine.profiling.phases import phase_of
from numba_engine.profiling.report import OpCall, OpProfile, ProfileSummary, StepProfile

Event = dict[str, Any]

_PROCESS = {"pid": 1, "tid": 1}


def profile_as_trace(model: ModelInfo, steps: Sequence[StepProfile], summary: ProfileSummary) -> dict[str, Any]:
    """``{"traceEvents", "displayTimeUnit", "otherData"}``: every step a complete event that encloses its ops."""
    events: list[Event] = [
        {"ph": "M", "name": "process_name", **_PROCESS, "args": {"name": f"{model.name} on {model.backend}"}},
        {"ph": "M", "name": "thread_name", **_PROCESS, "args": {"name": "engine steps and their ops"}},
    ]
    start_ns = 0
    for step in steps:
        of_step = _step_events(step, start_ns)
        events += of_step
        start_ns += _nanoseconds(of_step[0]["dur"] / 1e6)
    placed = all(step.timeline for step in steps if step.ops)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "laid_out": "single calls" if placed else "totals of each op, not single calls",
            "steps": "end to end; the time between two steps is not in the profile",
            "time": "predicted" if summary.time_source is TimeSource.SIMULATED else "measured",
            "time_source": summary.time_source.value,
            "bytes_and_flops": "by formula",
            "read_bandwidth_gbps": summary.read_bandwidth_gbps,
            "decode_tokens_per_s": summary.decode_tokens_per_s,
            "model": asdict(model),
        },
    }


def _step_events(step: StepProfile, start_ns: int) -> list[Event]:
    """The step, then what is in it, in whole nanoseconds, so that rounding never lets a part stick out."""
    parts = _calls(step, start_ns) if step.timeline else _totals(step, start_ns)
    end_ns = start_ns + _nanoseconds(step.time_s)
    if parts:
        end_ns = max(end_ns, _nanoseconds((parts[-1]["ts"] + parts[-1]["dur"]) / 1e6))
    total_bytes = sum(op.total_bytes for op in step.ops)
    gbps = total_bytes / step.net_time_s / 1e9 if step.net_time_s else 0.0
    args: Event = {
        "num_prefill_tokens": step.num_prefill_tokens,
        "num_decode_tokens": step.num_decode_tokens,
        "num_seqs": step.num_seqs,
        "bytes": total_bytes,
        "flops": sum(op.flops for op in step.ops),
        "gbps": gbps,
    }
    name = f"step {step.index}: {phase_of(step)}"
    if not step.profiled:
        name, args = f"{name}, not profiled", {key: value for key, value in args.items() if key.startswith("num_")}
    whole = _complete(name, "step", start_ns, end_ns - start_ns, args)
    if not step.profiled:
        return [whole]
    counter = {"ph": "C", "name": "GB/s", **_PROCESS, "ts": start_ns / 1e3, "args": {"GB/s": gbps}}
    return [whole, *parts, counter]


def _calls(step: StepProfile, start_ns: int) -> list[Event]:
    """Each call where it was. One begins where the one before it ended at the earliest: clocks round."""
    events, free_from_ns = [], start_ns
    for call in step.timeline:
        begin_ns = max(start_ns + _nanoseconds(call.start_s), free_from_ns)
        events.append(_complete(call.name, "op", begin_ns, _nanoseconds(call.time_s), _call_args(call)))
        free_from_ns = begin_ns + _nanoseconds(call.time_s)
    return events


def _totals(step: StepProfile, start_ns: int) -> list[Event]:
    parts: list[tuple[str, str, float, Event]] = [(op.name, "op", op.time_s, _op_args(op)) for op in step.ops]
    if parts:
        parts.append(("host", "host", step.host_time_s, {"what": "scheduling, batch building, text"}))
    if step.overhead_s:
        parts.append(("cost of looking", "overhead", step.overhead_s, {"what": "the recorder's, calibrated"}))
    events, now_ns = [], start_ns
    for name, category, time_s, args in parts:
        events.append(_complete(name, category, now_ns, _nanoseconds(time_s), args))
        now_ns += _nanoseconds(time_s)
    return events


def _op_args(op: OpProfile) -> Event:
    return {
        "calls": op.num_calls,
        "bytes": op.total_bytes,
        "weight_bytes": op.weight_bytes,
        "kv_bytes": op.kv_bytes,
        "activation_bytes": op.activation_bytes,
        "flops": op.flops,
        "gbps": op.gbps,
        "gflops": op.gflops,
        "flops_per_byte": op.intensity,
    }


def _call_args(call: OpCall) -> Event:
    args: Event = {"launches": call.num_launches, "bytes": call.num_bytes, "flops": call.flops}
    if call.layer is not None:
        args["layer"] = call.layer
    if call.time_s:
        args["gbps"] = call.num_bytes / call.time_s / 1e9
    return args


def _complete(name: str, category: str, start_ns: int, duration_ns: int, args: Event) -> Event:
    times = {"ts": start_ns / 1e3, "dur": duration_ns / 1e3}
    return {"ph": "X", "name": name, "cat": category, **_PROCESS, **times, "args": args}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
