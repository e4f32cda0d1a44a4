"""Reading what ``numba-engine profile --json`` wrote. Nothing in such a file is taken on trust."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from numba_engine.backends.instruments import CountedTraffic, KindBytes, TimeSource
from numba_engine.errors import ConfigError
from numba_engine.outputs import ModelInfo
from numba_engine.profiling.report import MemoryUse, OpCall, OpProfile, Peaks, ProfileSummary, StepProfile

Value = TypeVar("Value")

_LIMIT = 1 << 63
"""Of any number in a profile."""


@dataclass(frozen=True, slots=True)
class SavedProfile:
    """One profile, as it was when it was written."""

    model: ModelInfo
    steps: tuple[StepProfile, ...]
    summary: ProfileSummary


def read_profile(file: Path) -> SavedProfile:
    """The profile in ``file``. Raises ConfigError where it holds none, and OSError where it cannot be read."""
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _no_profile(file, f"it is not JSON ({error})") from error
    try:
        profile = _object(data, "the file")
        steps = _list(_member(profile, "steps", ""), "steps")
        return SavedProfile(
            model=_read(ModelInfo, _member(profile, "model", ""), "model"),
            steps=tuple(_read(StepProfile, step, f"steps[{index}]") for index, step in enumerate(steps)),
            summary=_read(ProfileSummary, _member(profile, "summary", ""), "summary"),
        )
    except _Wrong as error:
        raise _no_profile(file, str(error)) from None


def _no_profile(file: Path, reason: str) -> ConfigError:
    return ConfigError(f"{file} is no profile as written by `numba-engine profile MODEL --json`: {reason}")


class _Wrong(Exception):
    """Where in the file, and what."""


def _read(kind: type[Value], data: Any, where: str) -> Value:
    """A dataclass from an object; fields it does not know are passed over, as a newer version may write more."""
    given = _object(data, where)
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in given or (field.default is MISSING and field.default_factory is MISSING):
            path = f"{where}.{field.name}"
            values[field.name] = _READERS[str(field.type)](_member(given, field.name, where), path)
    return kind(**values)


def _object(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _Wrong(f"{where} is {_kind(data)}, not an object")
    return data


def _list(data: Any, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise _Wrong(f"{where} is {_kind(data)}, not a list")
    return data


def _member(data: dict[str, Any], name: str, where: str) -> Any:
    if name not in data:
        raise _Wrong(f"{where}.{name} is missing".lstrip("."))
    return data[name]


def _count(data: Any, where: str) -> int:
    if not isinstance(data, int) or isinstance(data, bool) or not 0 <= data < _LIMIT:
        raise _Wrong(f"{where} is {_kind(data)}, not a whole number of 0 or more")
    return data


def _number(data: Any, where: str) -> float:
    if not isinstance(data, int | float) or isinstance(data, bool) or not 0 <= data < _LIMIT:
        raise _Wrong(f"{where} is {_kind(data)}, not a number of 0 or more")
    return float(data)


def _text(data: Any, where: str) -> str:
    if not isinstance(data, str) or not data.isprintable():
        raise _Wrong(f"{where} is {_kind(data)}, not a printable text")
    return data


def _flag(data: Any, where: str) -> bool:
    if not isinstance(data, bool):
        raise _Wrong(f"{where} is {_kind(data)}, not true or false")
    return data


def _tuple_of(read: Callable[[Any, str], Value]) -> Callable[[Any, str], tuple[Value, ...]]:
    def read_all(data: Any, where: str) -> tuple[Value, ...]:
        return tuple(read(item, f"{where}[{index}]") for index, item in enumerate(_list(data, where)))

    return read_all


def _dataclass(kind: type[Value]) -> Callable[[Any, str], Value]:
    return lambda data, where: _read(kind, data, where)


def _optional(read: Callable[[Any, str], Value]) -> Callable[[Any, str], Value | None]:
    return lambda data, where: None if data is None else read(data, where)


def _time_source(data: Any, where: str) -> TimeSource:
    try:
        return TimeSource(_text(data, where))
    except ValueError:
        raise _Wrong(f"{where} is {_kind(data)}, not one of {', '.join(TimeSource)}") from None


def _shares(data: Any, where: str) -> tuple[tuple[str, float], ...]:
    shares = _object(data, where).items()
    return tuple((_text(name, f"a name in {where}"), _number(share, f"{where}.{name}")) for name, share in shares)


def _kind(data: Any) -> str:
    if isinstance(data, dict):
        return "an object"
    if isinstance(data, list):
        return "a list"
    return json.dumps(data)[:40]


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "int": _count,
    "float": _number,
    "str": _text,
    "bool": _flag,
    "int | None": _optional(_count),
    "float | None": _optional(_number),
    "tuple[int, ...]": _tuple_of(_count),
    "tuple[str, ...]": _tuple_of(_text),
    "tuple[OpProfile, ...]": _tuple_of(_dataclass(OpProfile)),
    "tuple[OpCall, ...]": _tuple_of(_dataclass(OpCall)),
    "tuple[tuple[str, float], ...]": _shares,
    "TimeSource": _time_source,
    "KindBytes": _dataclass(KindBytes),
    "CountedTraffic | None": _optional(_dataclass(CountedTraffic)),
    "Peaks | None": _optional(_dataclass(Peaks)),
    "MemoryUse | None": _optional(_dataclass(MemoryUse)),
}
"""By the annotation of a field."""
