"""Profiles on a terminal. Sizes are decimal: 1 MB is a million bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from numba_engine.profiling.report import OpProfile, ProfileSummary, StepProfile

BAR_WIDTH = 16


def step_table(step: StepProfile, *, read_bandwidth_gbps: float | None = None) -> RenderableType:
    """Where one step's time and bytes went; bandwidth shares only where the bandwidth is known."""
    what = []
    if step.num_prefill_tokens:
        what.append(format_plural(step.num_prefill_tokens, "prompt token"))
    if step.num_decode_tokens:
        what.append(f"{step.num_decode_tokens} generated")
    sequences = format_plural(step.num_seqs, "sequence")
    title = f"step {step.index}: {', '.join(what)}, {sequences}, {format_time(step.net_time_s)}"
    return _ops_table(title, step.ops, step.host_time_s, step.net_time_s, read_bandwidth_gbps)


def summary_table(summary: ProfileSummary) -> RenderableType:
    """The decode steps op by op, then what they add up to against the machine's limit."""
    host_share = dict(summary.shares).get("host", 0.0)
    ops_time_s = sum(op.time_s for op in summary.ops)
    time_s = ops_time_s / (1 - host_share) if host_share < 1 else 0.0
    title = format_plural(summary.num_decode_steps, "decode step")
    table = _ops_table(title, summary.ops, time_s - ops_time_s, time_s, summary.read_bandwidth_gbps)
    return Group(table, _limits(summary)) if summary.num_decode_steps else _limits(summary)


def _ops_table(
    title: str, ops: Sequence[OpProfile], host_time_s: float, time_s: float, read_bandwidth_gbps: float | None
) -> Table:
    table = plain_table(title, show_footer=True, footer_style="bold")
    table.add_column("op", footer="total", no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True, footer=str(sum(op.num_calls for op in ops)))
    table.add_column("time", justify="right", no_wrap=True, footer=format_time(time_s))
    table.add_column("share", justify="right", no_wrap=True, footer="100 %" if time_s else "")
    table.add_column("", max_width=BAR_WIDTH)
    table.add_column("bytes", justify="right", no_wrap=True, footer=format_bytes(sum(op.total_bytes for op in ops)))
    table.add_column("FLOPs", justify="right", no_wrap=True, footer=format_count(sum(op.flops for op in ops)))
    table.add_column("GB/s", justify="right", no_wrap=True, footer=_gbps(sum(op.total_bytes for op in ops), time_s))
    if read_bandwidth_gbps:
        table.add_column("of bw", justify="right", no_wrap=True)
    for op in sorted(ops, key=lambda op: -op.time_s):
        cells: list[RenderableType] = [op.name, str(op.num_calls), *_time_cells(op.time_s, time_s)]
        cells += [format_bytes(op.total_bytes), format_count(op.flops), _gbps(op.total_bytes, op.time_s)]
        if read_bandwidth_gbps:
            cells.append(f"{op.gbps / read_bandwidth_gbps:.0%}")
        table.add_row(*cells)
    table.add_row(Text("host", style="dim"), "", *_time_cells(host_time_s, time_s))
    return table


def _time_cells(part_s: float, whole_s: float) -> tuple[RenderableType, ...]:
    share = min(part_s / whole_s, 1.0) if whole_s else 0.0
    return format_time(part_s), f"{share:.1%}", Bar(size=1.0, begin=0.0, end=share, color="cyan")


def _limits(summary: ProfileSummary) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(style="dim")
    if summary.num_prefill_steps:
        steps = format_plural(summary.num_prefill_steps, "step")
        grid.add_row("prefill", f"{summary.prefill_tokens_per_s:.1f} tok/s", steps)
    if not summary.num_decode_steps:
        return grid
    split = f"weights {format_bytes(summary.weight_bytes_per_token)}, KV {format_bytes(summary.kv_bytes_per_token)}"
    steps = format_plural(summary.num_decode_steps, "step")
    grid.add_row("decode", f"{summary.decode_tokens_per_s:.1f} tok/s", f"median of {steps}")
    grid.add_row("bytes a token", format_bytes(summary.bytes_per_token), f"by formula: {split}")
    grid.add_row("read bandwidth", f"{summary.read_bandwidth_gbps:.1f} GB/s", "measured here, same threads")
    if summary.floor_s:
        limit = f"{1 / summary.floor_s:.1f} tok/s if every byte is read once at that bandwidth"
        grid.add_row("floor", format_time(summary.floor_s), limit)
        grid.add_row("reached", f"{summary.share_of_floor:.0%}", "of that limit")
    overhead = format_time(summary.overhead_s_per_step)
    grid.add_row("cost of looking", overhead, "a step, subtracted above")
    return grid


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
