"""Profiles on a terminal. Sizes are decimal: 1 MB is a million bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from numba_engine.backends.instruments import CountedTraffic, TimeSource
from numba_engine.profiling.journey import counted_journey, token_journey
from numba_engine.profiling.report import OpProfile, Peaks, ProfileSummary, StepProfile

BAR_WIDTH = 10


def step_table(step: StepProfile, *, peaks: Peaks | None = None) -> RenderableType:
    """Where one step's time and bytes went; what the roofline allows only where the peaks are known."""
    what = []
    if step.num_prefill_tokens:
        what.append(format_plural(step.num_prefill_tokens, "prompt token"))
    if step.num_decode_tokens:
        what.append(f"{step.num_decode_tokens} generated")
    sequences = format_plural(step.num_seqs, "sequence")
    title = f"step {step.index}: {', '.join(what)}, {sequences}, {format_time(step.net_time_s)}"
    if step.time_source is TimeSource.SIMULATED:
        title += ", predicted"
    if not step.profiled:
        return Text(f"{title}, not profiled")
    return _ops_table(title, step.ops, step.host_time_s, step.net_time_s, peaks)


def summary_table(summary: ProfileSummary) -> RenderableType:
    """Prefill and decode op by op, then what they add up to against the machine's limits."""
    predicted = ", times predicted" if summary.time_source is TimeSource.SIMULATED else ""
    parts: list[RenderableType] = []
    for name, ops, shares, num_steps in (
        ("prefill", summary.prefill_ops, summary.prefill_shares, summary.num_prefill_steps),
        ("decode", summary.ops, summary.shares, summary.num_decode_steps),
    ):
        if ops and num_steps:
            host_share = dict(shares).get("host", 0.0)
            ops_time_s = sum(op.time_s for op in ops)
            time_s = ops_time_s / (1 - host_share) if host_share < 1 else 0.0
            title = format_plural(num_steps, f"{name} step") + predicted
            parts += [_ops_table(title, ops, time_s - ops_time_s, time_s, summary.peaks), ""]
    if summary.num_decode_steps and any(op.counted for op in summary.ops):
        parts += [_levels_table(summary), ""]
    return Group(*parts, _limits(summary))


def _ops_table(title: str, ops: Sequence[OpProfile], host_time_s: float, time_s: float, peaks: Peaks | None) -> Table:
    counted = any(op.counted for op in ops)
    total_bytes = sum(op.total_bytes for op in ops)
    footers = ["total", f"{sum(op.num_calls for op in ops):,}", format_time(time_s), "100 %" if time_s else "", ""]
    footers += [format_bytes(total_bytes)]
    headers = ["op", "calls", "time", "share", "", "bytes"]
    if counted:
        headers.append("counted")
        footers.append(format_bytes(sum(_counted_bytes(op) for op in ops)))
    headers += ["FLOPs", "GB/s"]
    footers += [format_count(sum(op.flops for op in ops)), _gbps(total_bytes, time_s)]
    if peaks:
        headers += ["of roof", "bound"]
        footers += ["", ""]
    table = plain_table(title, show_footer=True, footer_style="bold")
    for header, footer in zip(headers, footers, strict=True):
        left = header in ("op", "", "bound")
        width = BAR_WIDTH if not header else None
        table.add_column(
            header, footer=footer, justify="left" if left else "right", no_wrap=bool(header), max_width=width
        )
    for op in sorted(ops, key=lambda op: -op.time_s):
        cells: list[RenderableType] = [op.name, f"{op.num_calls:,}", *_time_cells(op.time_s, time_s)]
        cells.append(format_bytes(op.total_bytes))
        if counted:
            cells.append(format_bytes(_counted_bytes(op)))
        cells += [format_count(op.flops), _gbps(op.total_bytes, op.time_s)]
        if peaks:
            cells += [f"{op.share_of_attainable(peaks):.0%}", op.bound(peaks).lower()]
        table.add_row(*cells)
    table.add_row(Text("host", style="dim"), "", *_time_cells(host_time_s, time_s))
    return table


def _counted_bytes(op: OpProfile) -> int:
    """As the formula counts: a kernel's own memory is not among them."""
    return op.counted.dram.total - op.counted.dram.scratch if op.counted else 0


def _levels_table(summary: ProfileSummary) -> Table:
    """What passes each level in a decode step: the formula's ideal and what the executor counted."""
    table = plain_table("bytes of a decode step, level by level")
    for header in ("level", "by formula", "counted", "weights", "KV", "activations", "kernels' own"):
        table.add_column(header, justify="left" if header == "level" else "right", no_wrap=True)
    steps = summary.num_decode_steps
    levels = zip(token_journey(summary.ops, steps, "ptx"), counted_journey(summary.ops, steps), strict=True)
    for by_formula, counted in levels:
        kinds = (counted.weight_bytes, counted.kv_bytes, counted.activation_bytes, counted.other_bytes)
        values = (by_formula.total_bytes, counted.total_bytes, *kinds)
        table.add_row(counted.name, *(format_bytes(round(value)) for value in values))
    total = sum((op.counted for op in summary.ops if op.counted), CountedTraffic())
    ideal = total.shared_wavefronts_ideal
    conflicts = f"{total.shared_wavefronts / ideal:.2f}" if ideal else "none"
    instructions = f"{format_count(total.warp_instructions // steps)} warp instructions"
    table.caption = f"{instructions}; shared-memory wavefronts over the ideal: {conflicts}"
    table.caption_justify = "left"
    return table


def _time_cells(part_s: float, whole_s: float) -> tuple[RenderableType, ...]:
    share = min(part_s / whole_s, 1.0) if whole_s else 0.0
    return format_time(part_s), f"{share:.1%}", Bar(size=1.0, begin=0.0, end=share, color="cyan")


def _limits(summary: ProfileSummary) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(style="dim")
    for row in _limit_rows(summary):
        grid.add_row(*row)
    return grid


def _limit_rows(summary: ProfileSummary) -> Iterator[tuple[str, str, str]]:
    if summary.num_prefill_steps:
        spread = _spread(summary.prefill_tokens_per_s_p10, summary.prefill_tokens_per_s_p90, summary.num_prefill_steps)
        steps = format_plural(summary.num_prefill_steps, "step")
        yield "prefill", f"{summary.prefill_tokens_per_s:,.1f} tok/s", steps + spread
    if not summary.num_decode_steps:
        return
    spread = _spread(summary.decode_tokens_per_s_p10, summary.decode_tokens_per_s_p90, summary.num_decode_steps)
    steps = format_plural(summary.num_decode_steps, "step")
    yield "decode", f"{summary.decode_tokens_per_s:,.1f} tok/s", f"median of {steps}{spread}"
    split = f"weights {format_bytes(summary.weight_bytes_per_token)}, KV {format_bytes(summary.kv_bytes_per_token)}"
    yield "bytes a token", format_bytes(summary.bytes_per_token), f"by formula: {split}"
    yield from _peak_rows(summary)
    if summary.floor_s:
        limit = f"{1 / summary.floor_s:,.1f} tok/s if every byte is read once at that bandwidth"
        yield "floor", format_time(summary.floor_s), limit
        yield "reached", f"{summary.share_of_floor:.0%}", "of that limit"
    if summary.decode_arithmetic_idle_share is not None:
        yield "arithmetic idle", f"{summary.decode_arithmetic_idle_share:.1%}", "of decode time, by formula"
    simulated = summary.time_source is TimeSource.SIMULATED
    gaps = "" if simulated else f"; {format_time(summary.launch_gap_s_per_step)} from one to the next, together"
    yield "launches", f"{summary.launches_per_step:,.0f}", f"a decode step{gaps}"
    if not simulated:
        yield "host", format_time(summary.host_s_per_step), "a decode step, outside the ops"
    if summary.memory is not None:
        memory = summary.memory
        kv = f"{format_bytes(memory.kv_used_bytes)} used of {format_bytes(memory.kv_cache_bytes)} of KV cache"
        weights = f"weights {format_bytes(memory.weight_bytes)}"
        yield "memory", format_bytes(memory.process_bytes), f"resident in this process; {weights}, {kv}"
    if not simulated:
        yield "cost of looking", format_time(summary.overhead_s_per_step), "a decode step, subtracted above"
    if summary.unprofiled_step_s and summary.profiled_step_s:
        steps = format_plural(summary.num_unprofiled_steps, "decode step")
        beside = f"median of {steps} among these; {format_time(summary.profiled_step_s)} with it"
        yield "without looking", format_time(summary.unprofiled_step_s), beside


def _peak_rows(summary: ProfileSummary) -> Iterator[tuple[str, str, str]]:
    peaks = summary.peaks
    if peaks is None:
        yield "read bandwidth", f"{summary.read_bandwidth_gbps:,.1f} GB/s", "measured here, same threads"
        return
    if summary.time_source is TimeSource.SIMULATED:
        launch = f"{format_time(peaks.launch_s)} a launch, then the roofline"
        yield "predicted for", peaks.device, f"the executor has no speed of its own; {launch}"
    bandwidth_source, gflops_source = _source(peaks.read_bandwidth_source), _source(peaks.gflops_source)
    yield "read bandwidth", f"{peaks.read_bandwidth_gbps:,.1f} GB/s", bandwidth_source
    if peaks.gflops is not None:
        yield "arithmetic peak", f"{peaks.gflops:,.0f} GFLOP/s", f"{peaks.arithmetic}, {gflops_source}"


def _source(source: str) -> str:
    """What a datasheet is called in full stands in the JSON."""
    return "measured here, same threads" if source == "measured" else "by the datasheet"


def _spread(p10: float, p90: float, num_steps: int) -> str:
    return f", 10th to 90th percentile {p10:,.1f} to {p90:,.1f}" if num_steps > 1 and p90 else ""


def plain_table(title: str, **style: Any) -> Table:
    """No rules between rows or columns: the look of every table here."""
    return Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim", **style)


def format_time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def format_bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def format_count(count: int) -> str:
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def format_plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _gbps(num_bytes: int, time_s: float) -> str:
    return f"{num_bytes / time_s / 1e9:.1f}" if time_s else ""
