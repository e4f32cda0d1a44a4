"""What the arrays that an op is called with are: weights, keys and values, or activations."""

from __future__ import annotations

import inspect
from dataclasses import fields
from functools import cache
from typing import Any

from numba_engine.backends.base import Array, KVCacheLayer, LayerWeights, Weight
from numba_engine.backends.instruments import TrafficKind
from numba_engine.profiling.traffic import FORMULAS

_WEIGHT_VECTORS = frozenset({"weight", "bias", "q_norm", "k_norm", "final_norm"})
"""Parameters of ops that are weights, though they are plain arrays."""


def arrays_by_kind(op: str, args: tuple[Any, ...]) -> dict[TrafficKind, list[Array]]:
    """All arrays among the arguments of a call, in the containers of ``backends/base.py`` too."""
    found: dict[TrafficKind, list[Array]] = {kind: [] for kind in TrafficKind}
    for name, arg in zip(_parameters(op), args, strict=False):
        if isinstance(arg, Weight | LayerWeights) or name in _WEIGHT_VECTORS:
            kind = TrafficKind.WEIGHTS
        else:
            kind = TrafficKind.KV if isinstance(arg, KVCacheLayer) else TrafficKind.ACTIVATIONS
        found[kind] += _arrays_in(arg)
    return found


def _arrays_in(value: Any) -> list[Array]:
    if isinstance(value, Weight):
        return [segment.data for segment in value.segments]
    if hasattr(value, "nbytes"):
        return [value]
    if hasattr(value, "__dataclass_fields__"):
        return [array for field in fields(value) for array in _arrays_in(getattr(value, field.name))]
    return []


@cache
def _parameters(op: str) -> tuple[str, ...]:
    return tuple(inspect.signature(FORMULAS[op]).parameters)
