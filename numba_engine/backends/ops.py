"""Op: one entry of the registry of ops. The methods of ``Backend`` that ``@op`` marks are the registry.

Whatever must know of every op derives from here: how recorders and test fakes delegate, what each op moves, how a trace
and an explanation name it, which arrays are weights, and where a backend finds its kernel.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from functools import cached_property
from typing import Any, TypeVar

from numba_engine.backends.arrays import Array, RopeTable, Weight
from numba_engine.backends.instruments import TrafficKind

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Place(Enum):
    """Where in a step an op has its place."""

    START = auto()
    """It begins the forward pass."""
    FIRST_OF_LAYER = auto()
    LAYER = auto()
    """In a layer, or wherever the op that is composed of it has its own place."""
    HEAD = auto()
    """After the last layer, up to the logits."""
    DRAW = auto()
    """After the forward pass."""

    @property
    def is_in_layer(self) -> bool:
        return self in (Place.FIRST_OF_LAYER, Place.LAYER)


@dataclass(frozen=True, eq=False)
class Op:
    """What is known of an op besides how it is computed."""

    name: str
    """Of the method, of its kernel files, of its reference function, its tests and its line in a profile."""
    summary: str
    """What it computes, in the field's words."""
    parameters: tuple[str, ...]
    source: str
    """The parameter that it makes its results of, for those who show what goes in and what comes out."""
    outputs: tuple[str, ...]
    """Parameters that it writes."""
    updates: tuple[str, ...]
    """Parameters that it reads and writes."""
    scratch: tuple[str, ...]
    """Parameters that hold nothing before it, and nothing that is read after it."""
    fuses: tuple[str, ...]
    """The unfused ops that it stands for; none for an unfused op."""
    place: Place
    is_repeatable: bool
    """Whether repeating a call shows what streaming a layer's weights takes: it leaves the same results each time."""
    traffic: Callable[..., Any] = field(repr=False)
    """Bytes and FLOPs of a call, from the op's own arguments (``backends/traffic.py``)."""
    compose: Callable[..., Any] = field(repr=False)
    """compose(backend, *args): a fused op as calls of the ops it fuses."""
    kinds: tuple[TrafficKind, ...] = field(repr=False)
    """Of the arrays in each parameter."""

    @property
    def is_fused(self) -> bool:
        return bool(self.fuses)

    @cached_property
    def takes_any_weight(self) -> bool:
        """Whether the weight's name belongs to the name of a call: it is whichever matrix the model multiplies with."""
        return "weight" in self.parameters

    @cached_property
    def reads_context(self) -> bool:
        """Whether it reads the KV cache, so that what a call moves depends on how long the contexts are."""
        cached = {name for name, kind in zip(self.parameters, self.kinds, strict=True) if kind is TrafficKind.KV}
        return not cached <= set(self.written)

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Parameters that hold what it computed, the outputs first."""
        return self.outputs + self.updates

    def argument(self, name: str, args: tuple[Any, ...]) -> Any:
        """The argument of a call that stands for a parameter."""
        return args[self.parameters.index(name)]

    def arrays_by_kind(self, args: tuple[Any, ...]) -> dict[TrafficKind, list[Array]]:
        """All arrays among the arguments of a call, those in weights, layers and batches too."""
        found: dict[TrafficKind, list[Array]] = {kind: [] for kind in TrafficKind}
        for kind, arg in zip(self.kinds, args, strict=False):
            _collect(arg, kind, found)
        return found


def op(
    summary: str,
    *,
    source: str,
    traffic: Callable[..., Any],
    outputs: tuple[str, ...] = (),
    updates: tuple[str, ...] = (),
    scratch: tuple[str, ...] = (),
    weights: tuple[str, ...] = (),
    fuses: tuple[str, ...] = (),
    place: Place = Place.LAYER,
    is_repeatable: bool = False,
) -> Callable[[_Method], _Method]:
    """Register a method of ``Backend``: calling it is ``self.run(op, args)``.

    The body of a fused op composes it of the ops that it fuses. ``weights`` are parameters that hold weights though
    they are plain arrays.
    """

    def register(method: _Method) -> _Method:
        parameters = tuple(inspect.signature(method).parameters)[1:]
        assert {source, *outputs, *updates, *scratch, *weights} <= set(parameters), method.__name__
        kinds = tuple(_kind(method.__annotations__[name], name in weights) for name in parameters)
        registered = Op(
            *(method.__name__, summary, parameters, source, outputs, updates, scratch, fuses, place, is_repeatable),
            *(traffic, method, kinds),
        )

        @functools.wraps(method)
        def call(self: Any, *args: Any) -> Any:
            return self.run(registered, args)

        call.op = registered  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return register


def _kind(annotation: str, is_weight: bool) -> TrafficKind:
    """Of a parameter, by the value that it takes (annotations are strings here)."""
    types = {part.strip() for part in annotation.split("|")}
    if is_weight or types & {"Weight", "Norm", "Layer", "GatedMlp"}:
        return TrafficKind.WEIGHTS
    return TrafficKind.KV if "KVCacheLayer" in types else TrafficKind.ACTIVATIONS


def _collect(value: Any, kind: TrafficKind, found: dict[TrafficKind, list[Array]]) -> None:
    """Add the arrays of a value; all are of one kind but for the tables of a layer's rotation."""
    if isinstance(value, Weight):
        found[kind] += [segment.data for segment in value.segments]
    elif hasattr(value, "__dataclass_fields__"):
        for part in fields(value):
            _collect(
                getattr(value, part.name), TrafficKind.ACTIVATIONS if isinstance(value, RopeTable) else kind, found
            )
    elif hasattr(value, "nbytes"):
        found[kind].append(value)
