"""A profile as one HTML page that needs nothing else: no script, no font, no file, no network.

Figures are inline SVG (``plots.py``), the same numbers stand in tables, and each says whether it was measured or worked
out by formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jinja2

from numba_engine.outputs import ModelInfo
from numba_engine.profiling.journey import JourneyLevel, token_journey
from numba_engine.profiling.phases import DECODE, PhaseProfile, phase_of, phase_profiles
from numba_engine.profiling.plots import (
    HOST,
    NUM_OP_COLORS,
    OTHER,
    OpKey,
    Plot,
    journey_plot,
    op_keys,
    phases_plot,
    require_matplotlib,
    roofline_plot,
    timeline_plot,
)
from numba_engine.profiling.report import ProfileSummary, StepProfile
from numba_engine.profiling.tables import format_bytes, format_count, format_plural, format_time

MEASURED = "measured"
FORMULA = "by formula"
BOTH = "by formula over measured time"
BY_BANDWIDTH = "by formula over measured bandwidth"
_SHORT = "by formula / measured"

_CLOCKS = {
    "cpu": "Times are measured by this machine's monotonic clock around each op.",
    "cuda": "Times are measured by the host's clock around each op; "
    "one that returns before the GPU is done looks short.",
    "ptx": "Times are measured, but of the executor that runs the GPU's kernels on this machine's processor: "
    "they say nothing about the speed of a GPU.",
}


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
    """The page, of one step at least. Raises ConfigError where matplotlib is missing."""
    assert steps, "nothing was measured"
    require_matplotlib()
    phases = phase_profiles(steps)
    keys = op_keys(phases)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("numba_engine.profiling"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("report.html").render(
        model=model,
        subtitle=_subtitle(model, phases),
        clock=_CLOCKS[model.backend],
        headlines=tuple(_headlines(summary, phases)),
        sections=tuple(_sections(model, steps, summary, phases, keys)),
        tables=tuple(_tables(model, steps, summary, phases, keys)),
    )


def _subtitle(model: ModelInfo, phases: Sequence[PhaseProfile]) -> str:
    ran = " and ".join(f"{format_plural(phase.num_steps, 'step')} of {phase.name}" for phase in phases)
    formats = ", ".join(model.weight_formats)
    return (
        f"{format_count(model.num_parameters)} parameters, {format_bytes(model.weight_bytes)} as {formats}, "
        f"on {model.backend}: {model.device_name}; "
        f"{model.activation_dtype} activations, {model.kv_cache_dtype} KV cache. {ran}."
    )


def _headlines(summary: ProfileSummary, phases: Sequence[PhaseProfile]) -> Iterator[_Headline]:
    if summary.num_decode_steps:
        steps = format_plural(summary.num_decode_steps, "step")
        yield _Headline("decode", f"{summary.decode_tokens_per_s:.1f} tok/s", f"median of {steps}", MEASURED)
    if summary.num_prefill_steps:
        steps = format_plural(summary.num_prefill_steps, "step")
        yield _Headline("prefill", f"{summary.prefill_tokens_per_s:.1f} tok/s", f"over {steps}", MEASURED)
    if summary.read_bandwidth_gbps:
        bandwidth = f"{summary.read_bandwidth_gbps:.1f} GB/s"
        yield _Headline("read bandwidth", bandwidth, "plain reading, same threads", MEASURED)
    decode = next((phase for phase in phases if phase.name == DECODE), None)
    if decode is None:
        return
    weights, kv = format_bytes(summary.weight_bytes_per_token), format_bytes(summary.kv_bytes_per_token)
    yield _Headline("bytes a token", format_bytes(summary.bytes_per_token), f"weights {weights}, KV {kv}", FORMULA)
    if summary.floor_s:
        limit = f"{1 / summary.floor_s:.1f} tok/s if each byte is read once"
        yield _Headline("floor", format_time(summary.floor_s), limit, BY_BANDWIDTH)
        yield _Headline("share of the floor", f"{summary.share_of_floor:.0%}", "100 % is the limit", BOTH)
    gbps = sum(op.total_bytes for op in decode.ops) / decode.time_s / 1e9 if decode.time_s else 0.0
    yield _Headline("decode bandwidth", f"{gbps:.1f} GB/s", "weights, KV and activations", BOTH)
    total_bytes = sum(op.total_bytes for op in decode.ops)
    intensity = sum(op.flops for op in decode.ops) / total_bytes if total_bytes else 0.0
    yield _Headline("decode intensity", f"{intensity:.2f}", "FLOP per byte, all ops", FORMULA)
    yield _Headline("host", f"{decode.share(decode.host_time_s):.1%}", "of decode time, between the ops", MEASURED)
    overhead = format_time(summary.overhead_s_per_step)
    yield _Headline("cost of looking", overhead, "a decode step, subtracted everywhere", "measured: calibrated")


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

    idle = [name for name in keys if not any(op.flops for phase in phases for op in phase.ops if op.name == name)]
    yield _Section(
        "roofline",
        "Roofline",
        "GFLOP/s: FLOPs by formula over measured time; FLOP per byte: by formula; bandwidth line: measured",
        roofline_plot(phases, keys, summary.read_bandwidth_gbps),
        numbers,
        (
            "Circles are decode, squares prefill. On the line an op takes in its bytes as fast as memory can be read; "
            "above it, they came from the caches. There is no compute roof, because this machine's arithmetic peak was "
            "not measured.",
            *((f"Without arithmetic, and so not here: {', '.join(idle)}.",) if idle else ()),
        ),
    )
    yield _Section(
        "phases",
        "Time by phase",
        MEASURED,
        phases_plot(phases, keys),
        with_host,
        ("Each bar is the whole time of its phase, the cost of looking subtracted.",),
    )
    for decode in (phase for phase in phases if phase.name == DECODE and phase.num_tokens):
        yield _Section(
            "journey",
            "The journey of a token's bytes",
            FORMULA,
            journey_plot(token_journey(decode, model.backend)),
            (("weights", "", "weights"), ("kv", "", "KV cache"), ("activations", "", "activations")),
            (
                "What an ideal kernel moves for the mean generated token, from memory inwards. Weights and KV come "
                "from memory anew in each step, each byte once; the activations that go from op to op stay in the "
                "caches.",
                f"At the end stand {format_count(_flops_per_token(decode))} floating-point operations.",
            ),
        )
    alone = all(step.num_seqs == 1 for step in steps)
    yield _Section(
        "timeline",
        "Timeline",
        "measured; floor: by formula over measured bandwidth",
        timeline_plot(steps, keys, summary.floor_s if alone else 0.0),
        (("muted", "", "upper bar: decode step"), ("ink", "", "upper bar: prefill step"), *with_host),
        ("The time between two steps is not in a profile; steps are set end to end.",),
    )


def _tables(
    model: ModelInfo,
    steps: Sequence[StepProfile],
    summary: ProfileSummary,
    phases: Sequence[PhaseProfile],
    keys: dict[str, OpKey],
) -> Iterator[_Table]:
    for phase in phases:
        yield _ops_table(phase, keys, summary.read_bandwidth_gbps)
    for decode in (phase for phase in phases if phase.name == DECODE and phase.num_tokens):
        yield _journey_table(token_journey(decode, model.backend), summary.read_bandwidth_gbps)
    yield _steps_table(steps)


def _ops_table(phase: PhaseProfile, keys: dict[str, OpKey], bandwidth_gbps: float) -> _Table:
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
            f"{op.gbps / bandwidth_gbps:.0%}" if bandwidth_gbps else "–",
        )
        for op in sorted(phase.ops, key=lambda op: keys[op.name].number)
    ]
    host = (HOST, "", format_time(phase.host_time_s), f"{phase.share(phase.host_time_s):.1%}", *[""] * 8)
    return _Table(
        caption=f"Ops of {phase.name}: {what}, {format_time(phase.time_s)}",
        columns=(
            ("op", ""),
            ("calls", "counted"),
            ("time", MEASURED),
            ("share", MEASURED),
            ("weights", FORMULA),
            ("KV", FORMULA),
            ("activations", FORMULA),
            ("FLOPs", FORMULA),
            ("FLOP/byte", FORMULA),
            ("GFLOP/s", _SHORT),
            ("GB/s", _SHORT),
            ("of bandwidth", _SHORT),
        ),
        rows=(*rows, host),
    )


def _journey_table(levels: Sequence[JourneyLevel], bandwidth_gbps: float) -> _Table:
    rows = []
    for index, level in enumerate(levels):
        nbytes = (level.weight_bytes, level.kv_bytes, level.activation_bytes, level.total_bytes)
        floor = format_time(level.total_bytes / bandwidth_gbps / 1e9) if index == 0 and bandwidth_gbps else "–"
        rows.append((level.name, *(format_bytes(round(count)) for count in nbytes), floor))
    return _Table(
        caption="Bytes of one generated token, level by level",
        columns=(
            ("level", ""),
            ("weights", FORMULA),
            ("KV", FORMULA),
            ("activations", FORMULA),
            ("together", FORMULA),
            ("time at the read bandwidth", BY_BANDWIDTH),
        ),
        rows=tuple(rows),
    )


def _steps_table(steps: Sequence[StepProfile]) -> _Table:
    rows = [
        (
            str(step.index),
            phase_of(step),
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
            ("time", MEASURED),
            ("ops", MEASURED),
            ("host", MEASURED),
            ("cost of looking", "calibrated, subtracted"),
            ("bytes", FORMULA),
            ("GB/s", _SHORT),
        ),
        rows=tuple(rows),
    )


def _flops_per_token(decode: PhaseProfile) -> int:
    return sum(op.flops for op in decode.ops) // decode.num_tokens


def _rate(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 or not value else f"{value:.2g}"
