"""What callers give as numbers and lists, as Python's own: NumPy's are meant as such, text as a list never is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def plain_number(value: Any) -> Any:
    """NumPy's integers, floats and bools as Python's; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def as_tuple(value: object) -> object:
    """A list, tuple, set or array of one dimension as a tuple of Python's own values; anything else as it is."""
    return tuple(map(plain_number, value)) if is_many(value) else value  # type: ignore[call-overload]


def is_many(value: object) -> bool:
    """It has members that are meant one by one. Text and bytes are sequences too, but never meant so."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | memoryview | Mapping)
