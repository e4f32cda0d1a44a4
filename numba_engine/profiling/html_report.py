"""A profile as one HTML page that needs nothing else: no script, no font, no file, no network.

Figures are inline SVG (``plots.py``), the same numbers stand in tables, and each says whether it was measured or worked
out by formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jinja2

from numba_engine.backends.instruments import CountedTraffic, TimeSource
from numba_engine.outputs import ModelInfo
from numba_engine.profiling.journey import JourneyLevel, counted_journey, token_journey
from numba_engine.profiling.phases import DECODE, PhaseProfile, phase_of, phase_profiles
from numba_engine.profiling.plots import (
    HOST,
    NUM_OP_COLORS,
    OTHER,
    OpKey,
    Plot,
    calls_plot,
    journey_plot,
    op_keys,
    phases_plot,
    require_matplotlib,
    roofline_plot,
    timeline_plot,
)
from numba_engine.profiling.report import OpProfile, Peaks, ProfileSummary, StepProfile
from numba_engine.profiling.tables import format_bytes, format_count, format_plural, format_time

MEASURED = "measured"
FORMULA = "by formula"

PREDICTED = "predicted"
DATASHEET = "by the datasheet"
COUNTED = "counted"

_CLOCKS = {
    TimeSource.HOST_CLOCK: "Times are measured by this machine's monotonic clock around each op.",
    TimeSource.EVENTS: "Times of ops are measured by events that the GPU records before and after each.",
    TimeSource.CUPTI: "Times of ops are measured by the GPU's own records of its kernels (CUPTI).",
    TimeSource.SIMULATED: "Times are predicted: the executor that runs the GPU's kernels here has no speed of its own. "
    "Each launch is taken to cost {launch}, then its bytes and FLOPs what the roofline of {device} allows. "
    "What passes each level of memory is counted while the kernels run.",
}

_COUNTED_TEXT = (
    "Under each bar what the executor counted: weights and KV that were touched at all; sectors between L2 and the "
    "multiprocessors; bytes in and out of shared memory, where a kernel keeps what its threads share; and bytes in and "
    "out of registers. What is more than the formula's was asked for again, by another thread or another block."
)
_UNPROFILED_TEXT = "Gaps among the decode steps are those that ran without a profile, to tell what looking costs."
_COUNTED_KINDS = ("weights", "KV", "activations", "kernels' own", "together")


@dataclass(frozen=True, slots=True)
class _Headline:
    label: str
    value: str
    detail: str
    basis: str


@dataclass(frozen=True, slots=True)
class _Table:
    """``columns`` are (name, basis); the first cell of a row names it."""

    caption: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class _Section:
    id: str
    title: str
    basis: str
    plot: Plot
    legend: tuple[tuple[str, str, str], ...]
    """(CSS variable of the colour, number, name)."""
    text: tuple[str, ...]


def render_html(model: ModelInfo, steps: Sequence[StepProfile], summary: ProfileSummary) -> str:
    """The page, of one profiled step at least. Raises ConfigError where matplotlib is missing."""
    assert any(step.profiled for step in steps), "nothing was measured"
    require_matplotlib()
    phases = phase_profiles(steps, summary.decode_seqs)
    keys = op_keys(phases)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("numba_engine.profiling"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    peaks = _peaks(summary)
    clock = _CLOCKS[summary.time_source].format(launch=format_time(peaks.launch_s), device=peaks.device)
    return environment.get_template("report.html").render(
        model=model,
        subtitle=_subtitle(model, phases),
        clock=clock,
        headlines=tuple(_headlines(summary, phases)),
        sections=tuple(_sections(model, steps, summary, phases, keys)),
        tables=tuple(_tables(model, steps, summary, phases, keys)),
    )


def _peaks(summary: ProfileSummary) -> Peaks:
    """Those of the summary; one that was saved by an older version knows the bandwidth alone."""
    bandwidth = summary.read_bandwidth_gbps
    return summary.peaks or Peaks("this machine", bandwidth, MEASURED, None, "unknown", "not measured")


def _time_basis(summary: ProfileSummary) -> str:
    return PREDICTED if summary.time_source is TimeSource.SIMULATED else MEASURED


def _source_basis(source: str) -> str:
    return MEASURED if source == MEASURED else DATASHEET


def _subtitle(model: ModelInfo, phases: Sequence[PhaseProfile]) -> str:
    ran = " and ".join(f"{format_plural(phase.num_steps, 'step')} of {phase.name}" for phase in phases)
    formats = ", ".join(model.weight_formats)
    return (
        f"{format_count(model.num_parameters)} parameters, {format_bytes(model.weight_bytes)} as {formats}, "
        f"on {model.backend}: {model.device_name}; "
        f"{model.activation_dtype} activations, {model.kv_cache_dtype} KV cache. {ran}."
    )


def _headlines(summary: ProfileSummary, phases: Sequence[PhaseProfile]) -> Iterator[_Headline]:
    basis, peaks = _time_basis(summary), _peaks(summary)
    if summary.num_decode_steps:
        steps = format_plural(summary.num_decode_steps, "step")
        spread = f", 10th to 90th percentile {summary.decode_tokens_per_s_p10:,.1f} to "
        spread += f"{summary.decode_tokens_per_s_p90:,.1f}"
        detail = f"median of {steps}{spread if summary.decode_tokens_per_s_p90 else ''}"
        yield _Headline("decode", f"{summary.decode_tokens_per_s:,.1f} tok/s", detail, basis)
    if summary.num_prefill_steps:
        steps = format_plural(summary.num_prefill_steps, "step")
        yield _Headline("prefill", f"{summary.prefill_tokens_per_s:,.1f} tok/s", f"over {steps}", basis)
    if summary.read_bandwidth_gbps:
        bandwidth = f"{summary.read_bandwidth_gbps:,.1f} GB/s"
        measured = peaks.read_bandwidth_source == MEASURED
        of = "plain reading, same threads" if measured else peaks.device
        yield _Headline("read bandwidth", bandwidth, of, _source_basis(peaks.read_bandwidth_source))
    if peaks.gflops is not None:
        peak = f"{peaks.gflops:,.0f} GFLOP/s"
        yield _Headline("arithmetic peak", peak, peaks.arithmetic, _source_basis(peaks.gflops_source))
    both = f"{FORMULA} over {basis} time"
    decode = next((phase for phase in phases if phase.name == DECODE), None)
    if decode is None:
        return
    weights, kv = format_bytes(summary.weight_bytes_per_token), format_bytes(summary.kv_bytes_per_token)
    yield _Headline("bytes a token", format_bytes(summary.bytes_per_token), f"weights {weights}, KV {kv}", FORMULA)
    if summary.floor_s:
        limit = f"{1 / summary.floor_s:,.1f} tok/s if each byte is read once"
        yield _Headline("floor", format_time(summary.floor_s), limit, f"{FORMULA} over the read bandwidth")
        yield _Headline("share of the floor", f"{summary.share_of_floor:.0%}", "100 % is the limit", both)
    gbps = sum(op.total_bytes for op in decode.ops) / decode.time_s / 1e9 if decode.time_s else 0.0
    yield _Headline("decode bandwidth", f"{gbps:,.1f} GB/s", "weights, KV and activations", both)
    total_bytes = sum(op.total_bytes for op in decode.ops)
    intensity = sum(op.flops for op in decode.ops) / total_bytes if total_bytes else 0.0
    yield _Headline("decode intensity", f"{intensity:.2f}", "FLOP per byte, all ops", FORMULA)
    if summary.decode_arithmetic_idle_share is not None:
        idle = f"{summary.decode_arithmetic_idle_share:.1%}"
        yield _Headline("arithmetic idle", idle, "of decode time", both)
    if summary.memory is not None:
        memory = summary.memory
        kv = f"weights {format_bytes(memory.weight_bytes)}, KV cache {format_bytes(memory.kv_used_bytes)} used of "
        kv += format_bytes(memory.kv_cache_bytes)
        yield _Headline("memory", format_bytes(memory.process_bytes), f"resident in the process; {kv}", MEASURED)
    if summary.time_source is TimeSource.SIMULATED:
        launches = f"{summary.launches_per_step:,.0f}"
        yield _Headline("launches", launches, "a decode step", COUNTED)
        return
    yield _Headline("host", f"{decode.share(decode.host_time_s):.1%}", "of decode time, outside the ops", MEASURED)
    gaps = f"{summary.launches_per_step:,.0f} launches a decode step, from one to the next"
    yield _Headline("launch gaps", format_time(summary.launch_gap_s_per_step), gaps, MEASURED)
    overhead = format_time(summary.overhead_s_per_step)
    yield _Headline("cost of looking", overhead, "a decode step, subtracted everywhere", "measured: calibrated")
    if summary.unprofiled_step_s and summary.profiled_step_s:
        among = f"a step, of {format_plural(summary.num_unprofiled_steps, 'decode step')} among these; "
        among += f"{format_time(summary.profiled_step_s)} with it"
        yield _Headline("without looking", format_time(summary.unprofiled_step_s), among, "measured: medians")


def _sections(
    model: ModelInfo,
    steps: Sequence[StepProfile],
    summary: ProfileSummary,
    phases: Sequence[PhaseProfile],
    keys: dict[str, OpKey],
) -> Iterator[_Section]:
    numbers = tuple((key.variable, str(key.number), name) for name, key in keys.items())
    colors = numbers[:NUM_OP_COLORS]
    if len(numbers) > NUM_OP_COLORS:
        rest = numbers[NUM_OP_COLORS:]
        colors += (("other", f"{rest[0][1]}–{rest[-1][1]}", f"{OTHER}: {', '.join(name for _, _, name in rest)}"),)
    with_host = (*colors, ("host", "", f"{HOST}: scheduling, batch building, text"))

    peaks, basis = _peaks(summary), _time_basis(summary)
    roof = _source_basis(peaks.read_bandwidth_source)
    if peaks.gflops is None:
        arithmetic = "There is no compute roof, because this machine's arithmetic peak is not known."
    else:
        arithmetic = f"Where there is a level roof, it is the arithmetic peak: {peaks.gflops:,.0f} GFLOP/s, "
        arithmetic += f"{peaks.arithmetic}. From the ridge on, {peaks.ridge or 0:,.0f} FLOP per byte, it binds."
    idle = [name for name in keys if not any(op.flops for phase in phases for op in phase.ops if op.name == name)]
    yield _Section(
        "roofline",
        "Roofline",
        f"GFLOP/s: FLOPs by formula over {basis} time; FLOP per byte: by formula; roof: {roof}",
        roofline_plot(phases, keys, peaks),
        numbers,
        (
            "Circles are decode, squares prefill. On the line an op takes in its bytes as fast as memory can be read; "
            "above it, they came from the caches. " + arithmetic,
            *((f"Without arithmetic, and so not here: {', '.join(idle)}.",) if idle else ()),
        ),
    )
    yield _Section(
        "phases",
        "Time by phase",
        basis,
        phases_plot(phases, keys),
        with_host,
        ("Each bar is the whole time of its phase, the cost of looking subtracted.",),
    )
    kinds = (("weights", "", "weights"), ("kv", "", "KV cache"), ("activations", "", "activations"))
    for decode in (phase for phase in phases if phase.name == DECODE and phase.num_tokens):
        counted = counted_journey(decode.ops, decode.num_tokens)
        yield _Section(
            "journey",
            "The journey of a token's bytes",
            f"{FORMULA}, and counted by the executor" if counted else FORMULA,
            journey_plot(token_journey(decode.ops, decode.num_tokens, model.backend), counted),
            (*kinds, ("own", "", "kernels' own: shared memory, partial results")) if counted else kinds,
            (
                "What an ideal kernel moves for the mean generated token, from memory inwards. Weights and KV come "
                "from memory anew in each step, each byte once; the activations that go from op to op stay in the "
                "caches.",
                *((_COUNTED_TEXT,) if counted else ()),
                f"At the end stand {format_count(_flops_per_token(decode))} floating-point operations.",
            ),
        )
    alone = all(step.num_seqs == 1 for step in steps)
    yield _Section(
        "timeline",
        "Timeline",
        f"{basis}; floor: by formula over the read bandwidth",
        timeline_plot(steps, keys, summary.floor_s if alone else 0.0),
        (("muted", "", "upper bar: decode step"), ("ink", "", "upper bar: prefill step"), *with_host),
        (
            "The time between two steps is not in a profile; steps are set end to end.",
            *((_UNPROFILED_TEXT,) if summary.num_unprofiled_steps else ()),
        ),
    )
    shown = _middle_step([step for step in steps if step.timeline], summary.decode_seqs)
    if shown is not None:
        yield _Section(
            "calls",
            f"One step, call by call: step {shown.index}, {phase_of(shown)}",
            basis,
            calls_plot(shown, keys),
            numbers,
            ("The median of the decode steps, or of all where there are none; every call of an op is a bar.",),
        )


def _tables(
    model: ModelInfo,
    steps: Sequence[StepProfile],
    summary: ProfileSummary,
    phases: Sequence[PhaseProfile],
    keys: dict[str, OpKey],
) -> Iterator[_Table]:
    for phase in phases:
        yield _ops_table(phase, keys, summary)
        if any(op.counted for op in phase.ops):
            yield _counted_table(phase, keys)
    for decode in (phase for phase in phases if phase.name == DECODE and phase.num_tokens):
        levels = token_journey(decode.ops, decode.num_tokens, model.backend)
        yield _journey_table(levels, counted_journey(decode.ops, decode.num_tokens), summary.read_bandwidth_gbps)
    yield _steps_table(steps, _time_basis(summary))


def _middle_step(steps: Sequence[StepProfile], decode_seqs: int) -> StepProfile | None:
    """The median decode step by time; where there is none, of all."""
    decode = [step for step in steps if step.is_decode_of(decode_seqs)] or steps
    return sorted(decode, key=lambda step: step.time_s)[len(decode) // 2] if decode else None


def _ops_table(phase: PhaseProfile, keys: dict[str, OpKey], summary: ProfileSummary) -> _Table:
    peaks, basis = _peaks(summary), _time_basis(summary)
    over_time = f"{FORMULA} / {basis}"
    what = format_plural(phase.num_steps, "step") + ", " + format_plural(phase.num_tokens, "token")
    rows = [
        (
            f"{keys[op.name].number} {op.name}",
            f"{op.num_calls:,}",
            format_time(op.time_s),
            f"{phase.share(op.time_s):.1%}",
            format_bytes(op.weight_bytes),
            format_bytes(op.kv_bytes),
            format_bytes(op.activation_bytes),
            format_count(op.flops),
            f"{op.intensity:.2f}",
            _rate(op.gflops),
            _rate(op.gbps),
            _roof_cell(op, peaks),
        )
        for op in sorted(phase.ops, key=lambda op: keys[op.name].number)
    ]
    host = (HOST, "", format_time(phase.host_time_s), f"{phase.share(phase.host_time_s):.1%}", *[""] * 8)
    return _Table(
        caption=f"Ops of {phase.name}: {what}, {format_time(phase.time_s)}",
        columns=(
            ("op", ""),
            ("calls", "counted"),
            ("time", basis),
            ("share", basis),
            ("weights", FORMULA),
            ("KV", FORMULA),
            ("activations", FORMULA),
            ("FLOPs", FORMULA),
            ("FLOP/byte", FORMULA),
            ("GFLOP/s", over_time),
            ("GB/s", over_time),
            ("of the roof, bound", over_time),
        ),
        rows=(*rows, host),
    )


def _roof_cell(op: OpProfile, peaks: Peaks) -> str:
    """Share of what the roofline allows, and what holds the op up."""
    if not peaks.read_bandwidth_gbps:
        return "–"
    return f"{op.share_of_attainable(peaks):.0%} {op.bound(peaks).lower()}"


def _counted_table(phase: PhaseProfile, keys: dict[str, OpKey]) -> _Table:
    rows = []
    for op in sorted(phase.ops, key=lambda op: keys[op.name].number):
        counted = op.counted or CountedTraffic()
        memory = counted.dram.total - counted.dram.scratch
        rows.append(
            (
                f"{keys[op.name].number} {op.name}",
                f"{counted.num_launches:,}",
                format_bytes(op.total_bytes),
                format_bytes(memory),
                f"{memory / op.total_bytes:.4f}" if op.total_bytes else "–",
                format_bytes(counted.l2.total),
                format_bytes(counted.shared_bytes),
                f"{counted.shared_wavefronts:,}",
                format_bytes(counted.register_bytes),
                format_count(counted.warp_instructions),
            )
        )
    return _Table(
        caption=f"Ops of {phase.name}, formula and executor",
        columns=(
            ("op", ""),
            ("launches", COUNTED),
            ("bytes", FORMULA),
            ("bytes", COUNTED),
            ("over formula", COUNTED),
            ("L2 cache", COUNTED),
            ("shared memory", COUNTED),
            ("wavefronts", COUNTED),
            ("registers", COUNTED),
            ("warp instructions", COUNTED),
        ),
        rows=tuple(rows),
    )


def _journey_table(levels: Sequence[JourneyLevel], counted: Sequence[JourneyLevel], bandwidth_gbps: float) -> _Table:
    rows = []
    for index, level in enumerate(levels):
        nbytes = (level.weight_bytes, level.kv_bytes, level.activation_bytes, level.total_bytes)
        floor = format_time(level.total_bytes / bandwidth_gbps / 1e9) if index == 0 and bandwidth_gbps else "–"
        cells = [level.name, *(format_bytes(round(count)) for count in nbytes)]
        if counted:
            of_level = counted[index]
            kinds = (of_level.weight_bytes, of_level.kv_bytes, of_level.activation_bytes, of_level.other_bytes)
            cells += [format_bytes(round(count)) for count in (*kinds, of_level.total_bytes)]
        rows.append((*cells, floor))
    return _Table(
        caption="Bytes of one generated token, level by level",
        columns=(
            ("level", ""),
            ("weights", FORMULA),
            ("KV", FORMULA),
            ("activations", FORMULA),
            ("together", FORMULA),
            *((name, COUNTED) for name in _COUNTED_KINDS if counted),
            ("time at the read bandwidth", FORMULA),
        ),
        rows=tuple(rows),
    )


def _steps_table(steps: Sequence[StepProfile], basis: str) -> _Table:
    rows = [
        (
            str(step.index),
            phase_of(step) if step.profiled else f"{phase_of(step)}, not profiled",
            str(step.num_prefill_tokens + step.num_decode_tokens),
            str(step.num_seqs),
            format_time(step.net_time_s),
            format_time(step.ops_time_s),
            format_time(step.host_time_s),
            format_time(step.overhead_s),
            format_bytes(sum(op.total_bytes for op in step.ops)),
            _rate(sum(op.total_bytes for op in step.ops) / step.net_time_s / 1e9) if step.net_time_s else "–",
        )
        for step in steps
    ]
    return _Table(
        caption=f"All {format_plural(len(steps), 'step')}",
        columns=(
            ("step", ""),
            ("phase", ""),
            ("tokens", "counted"),
            ("sequences", "counted"),
            ("time", basis),
            ("ops", basis),
            ("host", basis),
            ("cost of looking", "calibrated, subtracted"),
            ("bytes", FORMULA),
            ("GB/s", f"{FORMULA} / {basis}"),
        ),
        rows=tuple(rows),
    )


def _flops_per_token(decode: PhaseProfile) -> int:
    return sum(op.flops for op in decode.ops) // decode.num_tokens


def _rate(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 or not value else f"{value:.2g}"
