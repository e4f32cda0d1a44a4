"""Two profiles side by side: what became faster, what slower, and by how much.

Times are per token of their phase (prompt token or generated one), so that runs of different lengths compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from numba_engine.outputs import ModelInfo
from numba_engine.profiling.phases import DECODE, PREFILL, PhaseProfile, phase_profiles
from numba_engine.profiling.report import OpProfile
from numba_engine.profiling.saved_profile import SavedProfile
from numba_engine.profiling.tables import format_bytes, format_time, plain_table

HOST = "host"

_MEANS_THE_SAME = 0.02
"""Changes below this share are not coloured: a step's time varies by as much from run to run."""


@dataclass(frozen=True, slots=True)
class OpSide:
    """One op in one of the profiles."""

    time_s_per_token: float
    share: float
    """Of its phase."""
    gbps: float


@dataclass(frozen=True, slots=True)
class OpDiff:
    """One op of one phase in both; None on the side that does not have it."""

    phase: str
    name: str
    a: OpSide | None
    b: OpSide | None

    @property
    def delta_s(self) -> float:
        """Of the time a token: negative where B is faster. An op that one side lacks takes it no time."""
        return _time(self.b) - _time(self.a)

    @property
    def ratio(self) -> float | None:
        """B's time a token over A's; None where there are no two to compare."""
        return _time(self.b) / _time(self.a) if self.b and _time(self.a) else None


@dataclass(frozen=True, slots=True)
class FigureDiff:
    """One figure of the summaries."""

    name: str
    a: float
    b: float

    @property
    def delta(self) -> float:
        return self.b - self.a

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a else None


@dataclass(frozen=True, slots=True)
class ProfileDiff:
    """All that can be compared of two profiles."""

    model: tuple[tuple[str, object, object], ...]
    """(field, A's, B's) of what was run, where they differ."""
    summary: tuple[FigureDiff, ...]
    ops: tuple[OpDiff, ...]
    """Prefill, then decode; in each the ops that changed most first."""


def diff_profiles(a: SavedProfile, b: SavedProfile) -> ProfileDiff:
    sides = [
        (field.name, getattr(a.summary, field.name), getattr(b.summary, field.name)) for field in fields(a.summary)
    ]
    figures = [FigureDiff(name, *both) for name, *both in sides if all(isinstance(side, int | float) for side in both)]
    return ProfileDiff(_changes(a, b), tuple(figures), tuple(_op_diffs(a, b)))


def diff_as_json(diff: ProfileDiff) -> dict[str, Any]:
    """``{"model", "summary", "ops"}``, each delta and ratio beside its two sides."""
    return {
        "model": {name: {"a": a, "b": b} for name, a, b in diff.model},
        "summary": {
            figure.name: {"a": figure.a, "b": figure.b, "delta": figure.delta, "ratio": figure.ratio}
            for figure in diff.summary
        },
        "ops": [asdict(op) | {"delta_s": op.delta_s, "ratio": op.ratio} for op in diff.ops],
    }


def diff_tables(diff: ProfileDiff, name_a: str, name_b: str) -> RenderableType:
    """The two runs named, then the figures of the summary, then a table a phase."""
    parts: list[RenderableType] = [Text(f"A: {name_a}\nB: {name_b}")]
    parts += [Text(f"{name}: A {_plain(a)}, B {_plain(b)}", style="yellow") for name, a, b in diff.model]
    parts += [_summary_table(diff.summary)]
    for phase, per in ((PREFILL, "prompt token"), (DECODE, "generated token")):
        ops = [op for op in diff.ops if op.phase == phase]
        if ops:
            parts += ["", _ops_table(f"{phase}, per {per}", ops)]
    return Group(*parts)


def _changes(a: SavedProfile, b: SavedProfile) -> tuple[tuple[str, object, object], ...]:
    sides = [(field.name, getattr(a.model, field.name), getattr(b.model, field.name)) for field in fields(ModelInfo)]
    sides.append(("time_source", a.summary.time_source.value, b.summary.time_source.value))
    return tuple((name, of_a, of_b) for name, of_a, of_b in sides if of_a != of_b)


def _op_diffs(a: SavedProfile, b: SavedProfile) -> Iterator[OpDiff]:
    phases_a = {phase.name: phase for phase in phase_profiles(a.steps, a.summary.decode_seqs)}
    phases_b = {phase.name: phase for phase in phase_profiles(b.steps, b.summary.decode_seqs)}
    for phase in (PREFILL, DECODE):
        sides_a, sides_b = _sides(phases_a.get(phase)), _sides(phases_b.get(phase))
        names = dict.fromkeys([*sides_a, *sides_b])
        ops = [OpDiff(phase, name, sides_a.get(name), sides_b.get(name)) for name in names]
        yield from sorted(ops, key=lambda op: -abs(op.delta_s))


def _sides(phase: PhaseProfile | None) -> dict[str, OpSide]:
    if phase is None:
        return {}
    host = OpProfile(HOST, 0, phase.host_time_s, 0, 0, 0, 0)
    tokens = max(phase.num_tokens, 1)
    return {op.name: OpSide(op.time_s / tokens, phase.share(op.time_s), op.gbps) for op in (*phase.ops, host)}


def _time(side: OpSide | None) -> float:
    return side.time_s_per_token if side else 0.0


def _summary_table(figures: Sequence[FigureDiff]) -> RenderableType:
    table = plain_table("summary")
    for column in ("figure", "A", "B", "change", "B / A"):
        table.add_column(column, justify="left" if column == "figure" else "right", no_wrap=True)
    for figure in figures:
        show = _format_of(figure.name)
        sign = "+" if figure.delta > 0 else "-" if figure.delta < 0 else ""
        change = f"{sign}{show(abs(figure.delta))}"
        table.add_row(figure.name, show(figure.a), show(figure.b), change, _ratio(figure.ratio))
    return table


def _ops_table(title: str, ops: Sequence[OpDiff]) -> RenderableType:
    table = plain_table(title, show_footer=True, footer_style="bold")
    total_a, total_b = (sum(_time(side) for side in sides) for sides in zip(*((op.a, op.b) for op in ops), strict=True))
    footers = ["total", format_time(total_a), format_time(total_b), _change(total_a, total_b)]
    footers += [_ratio(total_b / total_a if total_a else None)]
    headers = ("op", "time A", "time B", "change", "B / A", "share A", "share B", "GB/s A", "GB/s B")
    for header, footer in zip(headers, [*footers, "", "", "", ""], strict=True):
        table.add_column(header, footer=footer, justify="left" if header == "op" else "right", no_wrap=True)
    for op in ops:
        times = [format_time(side.time_s_per_token) if side else "–" for side in (op.a, op.b)]
        change = Text(_change(_time(op.a), _time(op.b)), style=_style(op))
        shares = [f"{side.share:.1%}" if side else "–" for side in (op.a, op.b)]
        gbps = [f"{side.gbps:.1f}" if side and side.gbps else "–" for side in (op.a, op.b)]
        table.add_row(Text(op.name), *times, change, _ratio(op.ratio), *shares, *gbps)
    return table


def _style(op: OpDiff) -> str:
    if abs(op.delta_s) <= _MEANS_THE_SAME * max(_time(op.a), _time(op.b)):
        return "dim"
    return "green" if op.delta_s < 0 else "red"


def _change(a: float, b: float) -> str:
    return ("-" if b < a else "+") + format_time(abs(b - a))


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _format_of(figure: str) -> Callable[[float], str]:
    """By the unit that the name ends in."""
    if figure.endswith(("_per_s", "_gbps")) or "_per_s_p" in figure:
        return lambda value: f"{value:.1f}"
    if "bytes" in figure:
        return lambda value: format_bytes(round(value))
    if "share" in figure:
        return lambda value: f"{value:.1%}"
    return format_time if figure.endswith(("_s", "_s_per_step")) else lambda value: f"{value:g}"
