"""Typed, bounded reading of what a checkpoint says of its model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Final

from numba_engine.errors import CheckpointError, UnsupportedModelError

_log = logging.getLogger(__name__)

MAX_SIZE = 1 << 20  # of hidden_size and its like: far above any model, far below what could overflow a product
MAX_LAYERS = 1 << 12
MAX_HEAD_DIM = 1 << 10
MAX_VOCAB_SIZE = 1 << 24
MAX_POSITION = 1 << 21


def supported(field: str, value: object, names: Mapping[str, str], file: str) -> str:
    """Our name of what a field names. Raises UnsupportedModelError if it has none."""
    if isinstance(value, str) and value in names:
        return names[value]
    raise UnsupportedModelError(field, value, ", ".join(names), file=file)


_REQUIRED: Final = object()


class Fields:
    """Typed, bounded reading of an unchecked mapping; errors name the file and the field."""

    def __init__(self, values: Mapping[str, Any], file: str, *, key_prefix: str = "", section: str = "") -> None:
        """``key_prefix`` begins every key of the mapping; ``section`` is where the mapping itself was found."""
        self.values = values
        self.file = file
        self._key_prefix = key_prefix
        self._label = section + key_prefix

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(message, file=self.file)

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; null and absent are the default."""
        value = self.values.get(self._key_prefix + name)
        return default if value is None else value

    def integer(self, name: str, low: int, high: int, default: object = _REQUIRED) -> int:
        value = self._value(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: object = _REQUIRED) -> float:
        value = self._value(name, default)
        if not is_number(value) or not low <= value <= high:
            raise self._wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: object = _REQUIRED) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def token_ids(self, name: str, vocab_size: int) -> list[int]:
        """A token id or a list of them; none where the field is null or absent.

        What names no token of the model ends nothing and begins nothing: it is left out, with a warning.
        """
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        known = [i for i in ids if type(i) is int and 0 <= i < vocab_size]
        if len(known) < len(ids):
            _log.warning(
                "%s: %s%s = %.80r names no token of the %d there are; ignored",
                self.file, self._label, name, value, vocab_size,
            )  # fmt: skip
        return known

    def counts(self, name: str, num_layers: int, default: object = _REQUIRED) -> list[int]:
        """A count per layer; GGUF writes one for all where they are equal."""
        value = self._value(name, default)
        if not isinstance(value, list):
            value = [value] * num_layers
        if len(value) != num_layers:
            raise self._wrong(name, value, f"a count, or a list of {num_layers}")
        for count in value:
            if type(count) is not int or not 1 <= count <= MAX_SIZE:
                raise self._wrong(name, count, f"an integer from 1 to {MAX_SIZE}")
        return value

    def _value(self, name: str, default: object) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(f"{self._label}{name} is missing")
        return default

    def _wrong(self, name: str, value: object, allowed: str) -> CheckpointError:
        return self.error(f"{self._label}{name} must be {allowed}, got {value!r:.80}")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float
        return False
