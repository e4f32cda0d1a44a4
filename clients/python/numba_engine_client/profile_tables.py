"""A profile, laid out for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from numba_engine_api.v1 import inference_pb2 as pb
from numba_engine_client.tables import aligned, counted, duration, enum_word, rate, size

_BAR_WIDTH = 12


def step_line(step: pb.StepProfile, *, is_first: bool) -> str:
    """One step of a profile; the first one under its headings."""
    num_bytes = sum(op.weight_bytes + op.kv_bytes + op.activation_bytes for op in step.ops)
    gbps = num_bytes / step.time_s / 1e9 if step.time_s else 0.0
    heading = f"{'step':>5} {'prefill':>8} {'decode':>7} {'ms':>9} {'MB':>9} {'GB/s':>7}  text\n" if is_first else ""
    moved = f"{'-':>9} {'-':>7}" if step.unprofiled else f"{num_bytes / 1e6:>9.1f} {gbps:>7.1f}"
    text = "(not looked at)" if step.unprofiled and not step.text else repr(step.text) if step.text else ""
    line = f"{step.index:>5} {step.num_prefill_tokens:>8} {step.num_decode_tokens:>7} {step.time_s * 1e3:>9.2f} {moved}"
    return f"{heading}{line}  {text}".rstrip()


def timeline_table(step: pb.StepProfile) -> str:
    """The calls of one step: of each op the fastest, the middle and the slowest, and the layer of that."""
    by_name: dict[str, list[pb.OpCall]] = {}
    for call in step.calls:
        by_name.setdefault(call.name, []).append(call)
    rows: list[tuple[str, ...]] = [("op", "calls", "first at", "fastest", "median", "slowest", "in layer", "")]
    for name, calls in by_name.items():
        times = [call.time_s for call in calls]
        slowest = max(calls, key=lambda call: call.time_s)
        layer = f"{slowest.layer}" if slowest.HasField("layer") else "-"
        cells = (calls[0].start_s, min(times), median(times), slowest.time_s)
        rows.append((name, str(len(calls)), *map(duration, cells), layer, ""))
    return "\n".join(["", f"calls of step {step.index}", *aligned(rows)])


def profile_table(device: pb.ProfiledDevice, model: pb.ProfiledModel, summary: pb.ProfileSummary) -> str:
    """The summary of a profile: the machine, each op's share of a decode step's time, and the limit."""
    clock = enum_word(pb.TimeSource, device.time_source, "TIME_SOURCE_")
    parts = [
        "",
        f"{model.name} ({model.architecture}, {model.num_parameters / 1e6:,.0f} M parameters, "
        f"{model.weight_bytes / 1e6:,.1f} MB as {', '.join(model.weight_formats)})",
        f"on {device.backend}: {device.name}; times by {clock}, bytes by formula",
    ]
    if summary.finish_reason not in (pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_MAX_TOKENS):
        reason = enum_word(pb.FinishReason, summary.finish_reason, "FINISH_REASON_")
        parts.append(f"ended early: {reason}; figures are of the steps until then")
    if summary.num_decode_steps:
        parts += ["", *_ops(summary.num_decode_steps, summary.ops, summary.shares)]
        parts += _counted(summary.num_decode_steps, summary.ops)
    elif summary.num_prefill_steps:
        parts += ["", *_ops(summary.num_prefill_steps, summary.prefill_ops, summary.prefill_shares)]
    else:
        parts += ["", "no step was measured"]
    return "\n".join([*parts, "", *aligned([*_figures(device, summary)])])


def _ops(num_steps: int, ops: Sequence[pb.OpProfile], shares: Sequence[pb.OpShare]) -> list[str]:
    """Per step, largest share first."""
    by_name: Mapping[str, pb.OpProfile] = {op.name: op for op in ops}
    rows: list[tuple[str, ...]] = [
        ("op", "calls", "ms/step", "MB/step", "GB/s", "FLOP/B", "of limit", "bound", "share", "")
    ]
    for share in shares:
        op = by_name.get(share.name)
        bar = "█" * round(share.share * _BAR_WIDTH)
        if op is None:
            rows.append((share.name, *[""] * 7, f"{share.share:.1%}", bar))
            continue
        num_bytes = op.weight_bytes + op.kv_bytes + op.activation_bytes
        rows.append(
            (
                op.name,
                f"{op.num_calls / num_steps:g}",
                f"{op.time_s / num_steps * 1e3:.3f}",
                f"{num_bytes / num_steps / 1e6:.2f}",
                f"{op.gbps:.1f}",
                f"{op.intensity:.3g}",
                f"{op.share_of_attainable:.0%}" if op.HasField("share_of_attainable") else "",
                enum_word(pb.Bound, op.bound, "BOUND_") if op.bound else "",
                f"{share.share:.1%}",
                bar,
            )
        )
    return aligned(rows)


def _counted(num_steps: int, ops: Sequence[pb.OpProfile]) -> list[str]:
    """What the device counted per step, level by level; nothing where it counts nothing."""
    counted_ops = [op for op in ops if op.HasField("counted")]
    if not counted_ops:
        return []
    rows: list[tuple[str, ...]] = [("op", "by formula", "DRAM", "L2", "lanes", "shared", "conflicts", "")]
    for op in counted_ops:
        counted_bytes = op.counted
        levels = (counted_bytes.dram, counted_bytes.l2, counted_bytes.lanes)
        sums = [level.weights + level.kv + level.activations + level.scratch for level in levels]
        nbytes = [op.weight_bytes + op.kv_bytes + op.activation_bytes, *sums, counted_bytes.shared_bytes]
        ideal = counted_bytes.shared_wavefronts_ideal
        conflicts = f"{counted_bytes.shared_wavefronts / ideal:.2f} ×" if ideal else ""
        rows.append((op.name, *(size(each / num_steps) for each in nbytes), conflicts, ""))
    return ["", "bytes a step, as counted", *aligned(rows)]


def _figures(device: pb.ProfiledDevice, summary: pb.ProfileSummary) -> Iterator[tuple[str, str, str]]:
    """(what, figure, how it is meant)"""
    if summary.num_prefill_steps:
        spread = _spread(summary.prefill_tokens_per_s_p10, summary.prefill_tokens_per_s_p90)
        steps = counted(summary.num_prefill_steps, "step")
        yield "prefill", f"{rate(summary.prefill_tokens_per_s)} tok/s", f"{steps}{spread}"
    if summary.num_decode_steps:
        spread = _spread(summary.decode_tokens_per_s_p10, summary.decode_tokens_per_s_p90)
        steps = counted(summary.num_decode_steps, "step")
        yield "decode", f"{rate(summary.decode_tokens_per_s)} tok/s", f"median of {steps}{spread}"
    if summary.floor_s:
        kinds = f"weights {size(summary.weight_bytes_per_token)}, KV {size(summary.kv_bytes_per_token)}"
        yield "a token moves", size(summary.bytes_per_token), kinds
        yield "limit", f"{rate(1 / summary.floor_s)} tok/s", f"at the {_bandwidth(device, summary)}"
        yield "reached", f"{summary.share_of_floor:.0%}", "of that limit"
    if summary.HasField("decode_arithmetic_idle_share"):
        peaks = [peak for peak in device.peaks if peak.unit == "TFLOPS"]
        of = f" of {peaks[0].value:,.3g} TFLOPS ({peaks[0].name})" if peaks else ""
        yield "arithmetic idle", f"{summary.decode_arithmetic_idle_share:.1%}", f"of decode time, by formula{of}"
    if summary.num_decode_steps:
        gaps = f"a decode step, {duration(summary.launch_gap_s_per_step)} between ops"
        yield "host", duration(summary.host_s_per_step), f"{gaps}; launches: {summary.launches_per_step:,.0f}"
        yield "looking cost", duration(summary.overhead_s_per_step), "a decode step; subtracted above"
    if summary.num_unprofiled_steps:
        beside = (
            f"without looking, {duration(summary.profiled_step_s)} with it ({duration(summary.profiled_ops_s)} in ops)"
        )
        yield "a step", duration(summary.unprofiled_step_s), beside
    if summary.HasField("memory"):
        memory = summary.memory
        kv = f"KV {size(memory.kv_used_bytes)} of {size(memory.kv_cache_bytes)}"
        yield "memory", size(memory.process_bytes), f"of the process; weights {size(memory.weight_bytes)}, {kv} in use"


def _spread(p10: float, p90: float) -> str:
    return f"; p10 {rate(p10)}, p90 {rate(p90)}" if p10 and p90 and p10 != p90 else ""


def _bandwidth(device: pb.ProfiledDevice, summary: pb.ProfileSummary) -> str:
    gbps = f"{summary.read_bandwidth_gbps:,.1f} GB/s"
    sources = {peak.source for peak in device.peaks if peak.unit == "GB/s"}
    if pb.FIGURE_SOURCE_DATASHEET in sources:
        return f"{gbps} of {device.peaks_of}, by its datasheet"
    return f"{gbps} that this machine reads, measured"
