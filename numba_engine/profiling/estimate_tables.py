"""What the planner says, on a terminal: one GPU in full, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from numba_engine.profiling.bounds import MemoryNeed, Phase
from numba_engine.profiling.hardware import GIB, LINK_LATENCY_SOURCE
from numba_engine.profiling.roofline import Estimate
from numba_engine.profiling.tables import format_bytes, format_count, format_plural, format_time, plain_table

_BANDWIDTH_BY = {"datasheet": "datasheet", "measured": "measurement"}


def estimate_tables(estimates: Sequence[Estimate]) -> RenderableType:
    """Estimates of one model and workload: of a single GPU all there is to say, of several a row each."""
    return Group(_title(estimates[0]), _comparison(estimates) if len(estimates) > 1 else _details(estimates[0]))


def _title(one: Estimate) -> Text:
    workload = one.workload
    parts = [
        f"{one.model}: {format_count(one.num_parameters)} parameters",
        f"weights {one.weight_format}, KV {workload.kv.name}",
        f"batch {workload.batch}, context {workload.context:,}",
    ]
    if workload.tp > 1:
        parts.append(f"{workload.tp} GPUs")
    if workload.speculation is not None:
        spec = workload.speculation
        parts.append(f"speculation α {spec.acceptance:g}, γ {spec.draft_len}, c {spec.draft_cost:g}")
    return Text("; ".join(parts))


def _comparison(estimates: Sequence[Estimate]) -> RenderableType:
    table = _table("bounds by formula from datasheets", "GPU")
    _add_figures(
        table, "GB/s", "ms/token", "decode tok/s", "bound", "prefill tok/s", "ridge", "needs", "has", "fits", "J/token"
    )
    for one in estimates:
        table.add_row(
            one.gpu.key,
            f"{one.gpu.bandwidth_gbps:,.0f}",
            f"{one.decode.time_per_token_s * 1e3:.2f}",
            _rate(one.decode.tokens_per_s),
            one.decode.pass_time.bound.value,
            _rate(one.prefill.tokens_per_s) if one.prefill is not None else "not known",
            _ridge(one),
            format_bytes(round(one.memory.total_bytes)),
            format_bytes(one.memory.available_bytes),
            _yes(one.memory.fits),
            f"{one.joules_per_token:.2f}",
        )
    notes = [f"note: {note}" for note in dict.fromkeys(note for one in estimates for note in one.notes)]
    notes.append("J/token: estimate from published energies. --gpu NAME shows one in full, with sources.")
    return Group(table, *(Text(note, style="dim") for note in notes))


def _details(one: Estimate) -> RenderableType:
    notes = (Text(f"note: {note}", style="yellow") for note in one.notes)
    sections = (_hardware(one), _phases(one), _memory(one), _levers(one), Group(_energy(one), *notes), _sources(one))
    return Group(*(part for section in sections for part in ("", section)))


def _hardware(one: Estimate) -> RenderableType:
    gpu = one.gpu
    rates = (
        ("fp16 tensor", gpu.fp16_tflops),
        ("fp8", gpu.fp8_tflops),
        ("int8", gpu.int8_tops),
        ("fp4", gpu.fp4_tflops),
        ("fp16 shader", gpu.shader_fp16_tflops),
        ("fp32 shader", gpu.shader_fp32_tflops),
    )
    size = f"{gpu.memory_bytes / GIB:.4g} GiB ({format_bytes(gpu.memory_bytes)}) {gpu.memory_kind}"
    facts = [f"{gpu.bandwidth_gbps:,.5g} GB/s by {_BANDWIDTH_BY[gpu.bandwidth_source]}", size]
    if gpu.l2_bytes is not None:
        facts.append(f"L2 {gpu.l2_bytes >> 20} MiB")
    if gpu.tdp_w is not None:
        facts.append(f"{gpu.tdp_w:g} W")
    tflops = [f"{name} {rate:g}" for name, rate in rates if rate is not None]
    lines = [f"{gpu.name}: {', '.join(facts)}"]
    if gpu.measured is not None:
        tflops.append(f"{gpu.measured.instruction} {gpu.measured.tflops:.3g}, measured")
    if tflops:
        lines.append(f"dense TFLOPS: {', '.join(tflops)}")
    return Text("\n".join(lines))


def _phases(one: Estimate) -> RenderableType:
    table = _table("bounds, by formula", "phase")
    _add_figures(table, "time", "tok/s", "memory", "compute", "links", "bound", "of tensor", "of fp16 shader")
    rows: list[tuple[str, float, Phase]] = [("decode, a token", one.decode.time_per_token_s, one.decode)]
    if one.prefill is not None:
        rows.append(("prefill, all prompts", one.prefill.round_s, one.prefill))
    for name, time_s, phase in rows:
        parts = phase.pass_time
        compute = format_time(parts.compute_s) if one.machine_balance is not None else "not known"
        table.add_row(
            name,
            format_time(time_s),
            _rate(phase.tokens_per_s),
            format_time(parts.memory_s),
            compute,
            format_time(parts.link_s) if one.workload.tp > 1 else "",
            parts.bound.value,
            _share(phase.share_of_tensor_peak),
            _share(phase.share_of_shader_fp16_peak),
        )
    if one.prefill is None:
        table.add_row("prefill, all prompts", "not known")
    demand = one.decode.demand
    moved = f"weights {format_bytes(round(demand.weight_bytes))}, KV {_kv(one.memory, demand.kv_bytes)}"
    lines = [f"a decode pass moves {moved} on each GPU: FLOPs a byte {one.decode_intensity:.3g}"]
    if one.machine_balance is not None:
        lines[0] += f"; the GPU can do {one.machine_balance:.3g}"
        lines.append(
            f"ridge: bound by arithmetic from batch {one.ridge_batch:,}"
            if one.ridge_batch is not None
            else "ridge: none, reading keys and values keeps every batch bound by memory"
        )
    if one.target is not None:
        lines.append(
            f"target: {one.target.tokens_per_s:g} tok/s a sequence needs {one.target.bandwidth_gbps:,.1f} GB/s, "
            f"by bandwidth alone {one.target.num_gpus} of this GPU"
        )
    return Group(table, Text("\n".join(lines)))


def _memory(one: Estimate) -> RenderableType:
    need = one.memory
    verdict = "fits" if need.fits else "does NOT fit"
    lines = [
        f"memory on each GPU: weights {format_bytes(round(need.weight_bytes))} + KV {_kv(need, need.kv_bytes)} = "
        f"{format_bytes(round(need.total_bytes))} of {format_bytes(need.available_bytes)}: {verdict}"
    ]
    if need.max_sequences is not None and need.max_context is not None:
        fitting = format_plural(need.max_sequences, "sequence")
        lines.append(
            f"KV {format_bytes(round(need.kv_bytes_per_token))} a token; at most {fitting} of "
            f"this context, or {need.max_context:,} tokens of context at this batch"
        )
    return Text("\n".join(lines), style="" if need.fits else "bold red")


def _levers(one: Estimate) -> RenderableType:
    table = _table("levers, each by itself, by formula", "lever")
    table.add_column("change", overflow="fold")
    _add_figures(table, "phase", "tok/s", "factor", "bound", "needs", "fits")
    for lever in one.levers:
        table.add_row(
            lever.name,
            lever.change,
            lever.metric,
            _rate(lever.tokens_per_s),
            f"{lever.factor:.2f} ×",
            lever.bound.value,
            format_bytes(round(lever.memory_bytes)),
            _yes(lever.fits),
        )
    return table


def _energy(one: Estimate) -> RenderableType:
    table = _table("energy of a generated token: estimates from published figures", "level")
    _add_figures(table, "moved or done", "pJ each", "energy", "share")
    for level in one.energy:
        amount = format_bytes(round(level.count)) if level.unit == "bytes" else format_count(round(level.count))
        each = "a bit" if level.unit == "bytes" else "a multiply-add"
        share = level.joules / one.joules_per_token
        table.add_row(level.level, amount, f"{level.picojoules:.3g} {each}", _joules(level.joules), f"{share:.1%}")
    lines = f"together {_joules(one.joules_per_token)}"
    if one.joules_per_token_at_tdp is not None:
        lines += f"; at TDP for the time of a token {_joules(one.joules_per_token_at_tdp)}"
    return Group(table, Text(lines))


def _sources(one: Estimate) -> RenderableType:
    sources = [one.gpu.source]
    sources += [lever.source.removeprefix("by formula, ") for lever in one.levers if lever.source != "by formula"]
    sources += [level.source for level in one.energy]
    if one.workload.tp > 1 or any(lever.name == "tensor parallelism" for lever in one.levers):
        sources.append(LINK_LATENCY_SOURCE)
    grid = Table.grid(padding=(0, 1))
    for number, source in enumerate(dict.fromkeys(sources)):
        grid.add_row("" if number else "sources:", source, style="dim")
    return grid


def _table(title: str, first: str) -> Table:
    table = plain_table(title)
    table.add_column(first, no_wrap=True)
    return table


def _add_figures(table: Table, *headers: str) -> None:
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.1f}" if tokens_per_s < 1000 else f"{tokens_per_s:,.0f}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}" if share <= 1 + 1e-9 else "> 100%"


def _ridge(one: Estimate) -> str:
    return "-" if one.ridge_batch is None else f"{one.ridge_batch:,}"


def _yes(fits: bool) -> str:
    return "yes" if fits else "NO"


def _kv(need: MemoryNeed, nbytes: float) -> str:
    return format_bytes(round(nbytes)) if need.kv_bytes_per_token else "not counted"


def _joules(joules: float) -> str:
    return f"{joules:.2f} J" if joules >= 1 else f"{joules * 1e3:.1f} mJ"
