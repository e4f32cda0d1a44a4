"""The figures of the HTML report, drawn by matplotlib as SVG that goes into a page.

Every colour is a CSS variable of the page, so that one drawing serves light and dark; text stays text. Each figure
comes in two widths, because a wide one made small enough for a phone cannot be read.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from numba_engine.errors import ConfigError
from numba_engine.profiling.journey import JourneyLevel
from numba_engine.profiling.phases import DECODE, PhaseProfile, phase_of
from numba_engine.profiling.report import Peaks, StepProfile
from numba_engine.profiling.tables import format_bytes, format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_OP_COLORS = 7
OTHER = "other ops"
HOST = "host"

_WIDE_INCHES = 10.0
_NARROW_INCHES = 3.8
_FONT_POINTS = 10

# Around a point of the roofline, in 1/72 inch: how far its mark and a number reach, and where a number may stand.
_POINT_REACH = 9.5
_LABEL_REACH = 12.0
_PLACES = tuple(
    (radius * math.cos(math.radians(angle)), radius * math.sin(math.radians(angle)))
    for radius in (10.0, 20.0, 30.0, 40.0)
    for angle in range(0, 360, 30)
)

# matplotlib wants colours it knows; these never occur otherwise, and each becomes a variable of the page.
_INK, _MUTED, _GRID, _SURFACE = "#010101", "#020202", "#030303", "#040404"
_WEIGHTS, _KV, _ACTIVATIONS, _OWN = "#050505", "#060606", "#070707", "#0a0a0a"
_OTHER, _HOST = "#080808", "#090909"
_OPS = tuple(f"#1111{number:02x}" for number in range(1, NUM_OP_COLORS + 1))
_VARIABLES = {
    _INK: "ink",
    _MUTED: "muted",
    _GRID: "grid",
    _SURFACE: "surface",
    _WEIGHTS: "weights",
    _KV: "kv",
    _ACTIVATIONS: "activations",
    _OWN: "own",
    _OTHER: "other",
    _HOST: "host",
    **{color: f"op{number}" for number, color in enumerate(_OPS, 1)},
}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": _FONT_POINTS,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": _FONT_POINTS,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}


@dataclass(frozen=True, slots=True)
class OpKey:
    """How one op is marked in every figure: its number (1 takes most time), and the page's variable for its colour."""

    number: int
    variable: str


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure in both widths, as SVG elements."""

    wide: str
    narrow: str


def require_matplotlib() -> None:
    """Raises ConfigError, with the command that helps, where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"an HTML report needs matplotlib, which cannot be imported ({error}): pip install -e '.[report]'"
        ) from error


def op_keys(phases: Sequence[PhaseProfile]) -> dict[str, OpKey]:
    """Marks for all ops: by time in decode where there is any, then by time in prefill."""
    by_time: dict[str, OpKey] = {}
    for phase in sorted(phases, key=lambda phase: phase.name != DECODE):
        for op in sorted(phase.ops, key=lambda op: -op.time_s):
            number = len(by_time) + 1
            by_time.setdefault(op.name, OpKey(number, f"op{number}" if number <= NUM_OP_COLORS else "other"))
    return by_time


def roofline_plot(phases: Sequence[PhaseProfile], keys: Mapping[str, OpKey], peaks: Peaks) -> Plot:
    """Each op of each phase by its FLOPs a byte and its GFLOP/s, under what read bandwidth and arithmetic allow."""
    bandwidth_gbps = peaks.read_bandwidth_gbps
    points = [
        (phase.name, keys[op.name], op.intensity, op.gflops)
        for phase in phases
        for op in phase.ops
        if op.intensity and op.gflops
    ]
    notes = {
        _gid("point", phase.name, op.name): (
            f"{op.name}, {phase.name}: {op.intensity:.3g} FLOP/byte, {op.gflops:.3g} GFLOP/s, {op.gbps:.1f} GB/s"
        )
        for phase in phases
        for op in phase.ops
    }
    names = {key.number: name for name, key in keys.items()}

    def draw(figure: Figure, *, narrow: bool) -> None:
        axes = figure.add_subplot()
        axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP per byte", ylabel="achieved GFLOP/s")
        xs, ys = [x for _, _, x, _ in points] or [1.0], [y for _, _, _, y in points] or [1.0]
        left, right = min(xs) / 2, max(xs) * 2
        roof = peaks.gflops or math.inf
        if peaks.ridge is not None and bandwidth_gbps and max(ys) > roof / 50:
            right = max(right, peaks.ridge * 2)  # near enough to the ridge for it to tell something
        ends = [left * bandwidth_gbps, min(right * bandwidth_gbps, roof)] if bandwidth_gbps else ys
        axes.set_xlim(left, right)
        axes.set_ylim(min([*ys, *ends]) / 2, max([*ys, *ends]) * 2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        if bandwidth_gbps:
            until = min(right, roof / bandwidth_gbps)
            axes.plot([left, until], [ends[0], until * bandwidth_gbps], color=_INK, linewidth=1.6, gid="bandwidth-line")
            said = "measured" if peaks.read_bandwidth_source == "measured" else "datasheet"
            texts = [f"read bandwidth {bandwidth_gbps:,.1f} GB/s, {said}"]
            if until < right:
                axes.plot([until, right], [roof, roof], color=_INK, linewidth=1.6, gid="arithmetic-line")
                said = "measured" if peaks.gflops_source == "measured" else "datasheet"
                texts.append(f"arithmetic {roof:,.0f} GFLOP/s, {said}")
            text = "\n".join(texts)
            axes.annotate(text, (right, ends[1]), (0, 5), textcoords="offset points", ha="right", va="bottom")
        for phase, key, x, y in points:
            gid = _gid("point", phase, names[key.number])
            marker = "o" if phase == DECODE else "s"
            axes.plot([x], [y], marker, markersize=8, color=_color(key), markeredgecolor=_SURFACE, gid=gid)
        _number_points(figure, axes, [(x, y, str(key.number)) for _, key, x, y in points])

    return _plot("roofline", "Roofline: achieved GFLOP/s of each op over its FLOP per byte", draw, (5.2, 4.4), notes)


def phases_plot(phases: Sequence[PhaseProfile], keys: Mapping[str, OpKey]) -> Plot:
    """A bar a phase, divided among its ops and the host."""
    notes = {}
    for phase in phases:
        for name, time_s in (*((op.name, op.time_s) for op in phase.ops), (HOST, phase.host_time_s)):
            notes[_gid("share", phase.name, name)] = (
                f"{name}, {phase.name}: {format_time(time_s)}, {phase.share(time_s):.1%}"
            )

    def draw(figure: Figure, *, narrow: bool) -> None:
        axes = figure.add_subplot()
        for row, phase in enumerate(phases):
            begin = 0.0
            for name, time_s, color, label in _parts(phase, keys):
                share = phase.share(time_s) * 100
                bar = axes.barh(row, share, left=begin, height=0.55, color=color, edgecolor=_SURFACE, linewidth=1)
                bar[0].set_gid(_gid("share", phase.name, name))
                if share > (7 if narrow else 3) * max(len(label), 1):
                    axes.text(begin + share / 2, row, label, ha="center", va="center_baseline", color=_SURFACE)
                begin += share
            per_step = format_time(phase.time_s / phase.num_steps)
            axes.text(0, row - 0.36, f"{phase.name}: {per_step} a step in the mean", ha="left", va="bottom")
        axes.set(xlim=(0, 100), ylim=(len(phases) - 0.5, -0.75), yticks=[], xlabel="% of the phase's time")
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)

    height = 0.7 + 0.8 * len(phases)
    return _plot("phases", "Share of each op in the time of prefill and of decode", draw, (height, height), notes)


def journey_plot(levels: Sequence[JourneyLevel], counted: Sequence[JourneyLevel] = ()) -> Plot:
    """A bar a level: the bytes that pass it for one token, by formula; under it, where there are any, those counted."""
    kinds = (("weights", _WEIGHTS), ("KV", _KV), ("activations", _ACTIVATIONS), ("kernels' own", _OWN))
    bars = [("bytes", level, "by formula" if counted else "") for level in levels]
    for place, level in enumerate(counted):
        bars.insert(2 * place + 1, ("counted", level, "counted"))
    notes = {}
    for prefix, level, basis in bars:
        name = f"{level.name}, {basis}" if basis else level.name
        for (kind, _), nbytes in zip(kinds, _kinds(level), strict=True):
            notes[_gid(prefix, level.name, kind)] = f"{name}, {kind}: {format_bytes(round(nbytes))}"

    def draw(figure: Figure, *, narrow: bool) -> None:
        axes = figure.add_subplot()
        for row, (prefix, level, basis) in enumerate(bars):
            begin = 0.0
            for (kind, color), nbytes in zip(kinds, _kinds(level), strict=True):
                bar = axes.barh(row, nbytes / 1e6, left=begin, height=0.4, color=color)
                bar[0].set_gid(_gid(prefix, level.name, kind))
                begin += nbytes / 1e6
            text = f"{level.name}{', ' if basis else ''}{basis}: {format_bytes(round(level.total_bytes))}"
            axes.text(0, row - 0.26, text, ha="left", va="bottom")
        axes.set(ylim=(len(bars) - 0.6, -0.75), yticks=[], xlabel="MB a generated token")
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)

    height = 0.7 + 0.62 * len(bars)
    return _plot("journey", "Bytes that pass each level of memory for a token", draw, (height, height), notes)


def calls_plot(step: StepProfile, keys: Mapping[str, OpKey]) -> Plot:
    """Every call of one step when it ran: a lane an op, the one that takes most time on top."""
    names = [name for name in keys if any(call.name == name for call in step.timeline)]
    notes = {
        _gid("call", str(place), call.name): (
            f"{call.name}{'' if call.layer is None else f', layer {call.layer}'}: {format_time(call.time_s)}, "
            f"from {format_time(call.start_s)}, {format_bytes(call.num_bytes)}"
        )
        for place, call in enumerate(step.timeline)
    }

    def draw(figure: Figure, *, narrow: bool) -> None:
        axes = figure.add_subplot()
        for row, name in enumerate(names):
            axes.text(0, row - 0.3, f"{keys[name].number} {name}", ha="left", va="bottom")
            for place, call in enumerate(step.timeline):
                if call.name == name:
                    width = max(call.time_s * 1e3, 1e-9)
                    bar = axes.barh(row, width, left=call.start_s * 1e3, height=0.45, color=_color(keys[name]))
                    bar[0].set_gid(_gid("call", str(place), name))
        end_s = max(call.start_s + call.time_s for call in step.timeline)
        axes.set(xlim=(0, max(end_s, step.time_s) * 1e3), ylim=(len(names) - 0.5, -0.85), yticks=[])
        axes.set_xlabel("ms since the step began")
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)

    height = 0.7 + 0.5 * len(names)
    return _plot("calls", "Every call of one step in time", draw, (height, height), notes)


def timeline_plot(steps: Sequence[StepProfile], keys: Mapping[str, OpKey], floor_s: float) -> Plot:
    """Above, when each step ran; below, what each decode step took, op by op, over the time memory alone would need.

    ``floor_s`` is for a step as well as for a token where a step has one sequence; elsewhere pass 0.
    """
    decode = [step for step in steps if phase_of(step) == DECODE]
    notes = {}
    start_s = 0.0
    spans = []
    for step in steps:
        spans.append((step, start_s))
        notes[f"step-{step.index}"] = (
            f"step {step.index}: {phase_of(step)}, {format_time(step.net_time_s)}, from {format_time(start_s)}"
        )
        start_s += step.net_time_s

    def draw(figure: Figure, *, narrow: bool) -> None:
        rows = [1, 4] if decode else [1]
        all_axes = figure.subplots(len(rows), 1, height_ratios=rows, squeeze=False)[:, 0]
        lane = all_axes[0]
        gap = 40 / max(len(steps), 80)  # narrower as bars become so
        for step, begin_s in spans:
            color = _MUTED if phase_of(step) == DECODE else _INK
            width = step.net_time_s * 1e3
            bar = lane.barh(0, width, left=begin_s * 1e3, color=color, edgecolor=_SURFACE, linewidth=gap)
            bar[0].set_gid(f"step-{step.index}")
        lane.set(
            xlim=(0, max(start_s * 1e3, 1e-9)), ylim=(-0.4, 0.4), yticks=[], xlabel="ms since the first step began"
        )
        lane.set_title("all steps, end to end")
        lane.spines["left"].set_visible(False)
        if decode:
            _draw_decode_steps(all_axes[1], decode, keys, floor_s)

    return _plot("timeline", "Steps in time, and the time of each decode step by op", draw, (4.8, 4.8), notes)


def _draw_decode_steps(axes: Axes, decode: Sequence[StepProfile], keys: Mapping[str, OpKey], floor_s: float) -> None:
    colored = [name for name, key in keys.items() if key.number <= NUM_OP_COLORS]
    layers = [([_time_of(step, [name]) for step in decode], _color(keys[name])) for name in colored]
    others = [name for name in keys if name not in colored]
    layers.append(([_time_of(step, others) for step in decode], _OTHER))
    layers.append(([step.host_time_s for step in decode], _HOST))
    edges = [step.index - 0.5 for step in decode] + [decode[-1].index + 0.5]
    below = [0.0] * len(decode)
    for times, color in layers:
        above = [low + time_s * 1e3 for low, time_s in zip(below, times, strict=True)]
        axes.stairs(above, edges, baseline=below, fill=True, color=color, linewidth=0)
        below = above
    if floor_s:
        axes.axhline(floor_s * 1e3, color=_INK, linewidth=1.4, linestyle=(0, (4, 3)), gid="floor-line")
    axes.set(xlabel="step", ylim=(0, max(below) * 1.08 or 1.0), xlim=(edges[0], edges[-1]))
    axes.locator_params(axis="x", integer=True)
    axes.set_title("ms a decode step" + (f"; dashed: the floor, {format_time(floor_s)}" if floor_s else ""))


def _number_points(figure: Figure, axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """A number beside each point, in the nearest place that is free, with a thin line where that is not near."""
    figure.draw_without_rendering()
    pixels_per_point = figure.dpi / 72
    centers = [axes.transData.transform((x, y)) / pixels_per_point for x, y, _ in points]
    taken = [(float(x), float(y), _POINT_REACH) for x, y in centers]
    for (x, y, number), (center_x, center_y) in zip(points, centers, strict=True):
        places = [(float(center_x + dx), float(center_y + dy), dx, dy) for dx, dy in _PLACES]
        clear = [place for place in places if all(math.hypot(place[0] - u, place[1] - v) >= r for u, v, r in taken)]
        label_x, label_y, dx, dy = (clear or places)[0]
        taken.append((label_x, label_y, _LABEL_REACH))
        line = {"arrowstyle": "-", "color": _MUTED, "linewidth": 0.6, "shrinkA": 5, "shrinkB": 3}
        axes.annotate(
            number,
            (x, y),
            (dx, dy),
            textcoords="offset points",
            ha="center",
            va="center",
            arrowprops=line if math.hypot(dx, dy) > 2 * _POINT_REACH else None,
        )


def _time_of(step: StepProfile, names: Sequence[str]) -> float:
    return sum(op.time_s for op in step.ops if op.name in names)


def _parts(phase: PhaseProfile, keys: Mapping[str, OpKey]) -> list[tuple[str, float, str, str]]:
    """(name, seconds, colour, label) of the bar's parts, in the order of the keys: few colours, so the rest is one."""
    times = {op.name: op.time_s for op in phase.ops}
    parts = []
    other_s = 0.0
    for name, key in keys.items():
        if key.number <= NUM_OP_COLORS:
            parts.append((name, times.get(name, 0.0), _color(key), str(key.number)))
        else:
            other_s += times.get(name, 0.0)
    return [*parts, (OTHER, other_s, _OTHER, ""), (HOST, phase.host_time_s, _HOST, HOST)]


def _kinds(level: JourneyLevel) -> tuple[float, float, float, float]:
    return level.weight_bytes, level.kv_bytes, level.activation_bytes, level.other_bytes


def _color(key: OpKey) -> str:
    return _OTHER if key.number > NUM_OP_COLORS else _OPS[key.number - 1]


def _gid(*parts: str) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", "-".join(parts).lower())


def _plot(
    name: str, label: str, draw: Callable[..., None], heights: tuple[float, float], notes: Mapping[str, str]
) -> Plot:
    wide = _svg(f"{name}-wide", label, draw, (_WIDE_INCHES, heights[0]), notes, narrow=False)
    return Plot(wide, _svg(f"{name}-narrow", label, draw, (_NARROW_INCHES, heights[1]), notes, narrow=True))


def _svg(
    name: str,
    label: str,
    draw: Callable[..., None],
    size_inches: tuple[float, float],
    notes: Mapping[str, str],
    *,
    narrow: bool,
) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    out = io.BytesIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size_inches, layout="constrained")
        draw(figure, narrow=narrow)
        figure.savefig(out, format="svg", metadata={"Date": None})
    return _for_page(out.getvalue(), name, label, notes)


def _for_page(svg: bytes, name: str, label: str, notes: Mapping[str, str]) -> str:
    """matplotlib's file as an element of an HTML page: nothing outside is named, ids are the page's only ones."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: _attribute(value, name) for key, value in element.attrib.items()}
        for child in [child for child in element if child.tag.rpartition("}")[2] in ("metadata", "style")]:
            element.remove(child)
        note = notes.get(element.get("id", ""))
        if note is not None:
            title = ElementTree.Element("title")
            title.text = note
            element.insert(0, title)
        if "id" in element.attrib:
            element.set("id", f"{name}-{element.get('id')}")
    _, _, width, height = root.attrib["viewBox"].split()
    root.attrib = {"viewBox": f"0 0 {width} {height}", "role": "img", "aria-label": label, "class": "plot"}
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def _attribute(value: str, name: str) -> str:
    """References follow the ids; colours become variables; the page chooses the typeface."""
    value = re.sub(r"url\(#", f"url(#{name}-", value)
    if value.startswith("#"):
        value = f"#{name}-{value[1:]}" if value not in _VARIABLES else value
    value = re.sub(r"#[0-9a-f]{6}\b", lambda match: _variable(match.group()), value)
    return re.sub(r"(font(?:-family)?: [^;]*?)'DejaVu Sans'[^;]*", r"\1system-ui, sans-serif", value)


def _variable(color: str) -> str:
    return f"var(--{_VARIABLES[color]})" if color in _VARIABLES else color
