"""CloseUp: a recorder that keeps every call of a step by itself, and the logits that the sampler was given."""

from __future__ import annotations

from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import numpy as np

from numba_engine.backends.arrays import KVCacheLayer, Weight
from numba_engine.backends.base import OPS
from numba_engine.backends.layers import GatedMlp, Layer
from numba_engine.backends.ops import Op, Place
from numba_engine.backends.sampling import Sampled
from numba_engine.profiling.recorder import Recorder, TimedCall
from numba_engine.profiling.report import OpProfile, StepProfile

_REPETITIONS = 20
_CACHEABLE_BYTES = 4 << 20
"""Weights of about this size stay in the caches of today's CPUs from one call to the next."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix ``[out_features, in_features]``."""

    name: str
    shape: tuple[int, int]
    formats: tuple[str, ...]
    """Storage formats of its rows, in order."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class NamedShape:
    """An array that goes into an op or comes out of it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallProfile:
    """One call of an op or a phase."""

    op: OpProfile
    matrix: Matrix | None
    inputs: NamedShape
    outputs: NamedShape


@dataclass(frozen=True, slots=True)
class RepeatedCall:
    """One call of the step made again and again with the same arguments, so that its weights lie in the caches."""

    call: CallProfile
    in_step_time_s: float
    """In the step: the median of the calls that stream as much, one a layer."""
    repeated_time_s: float
    """The median of the repetitions."""


@dataclass(frozen=True, slots=True, eq=False)
class CloseUpStep(StepProfile):
    """One step, call by call."""

    calls: tuple[CallProfile, ...] = ()
    """In order."""
    logits: np.ndarray | None = None
    """Host copy [L, vocab] float32, as the model gave them; None if no token was drawn."""
    repeated: RepeatedCall | None = None
    """None where ops run on a device of their own."""


class CloseUp(Recorder):
    """A recorder whose steps are :class:`CloseUpStep`."""

    _logits: np.ndarray | None = None
    _copying_s = 0.0
    _close_ups: tuple[CallProfile, ...] = ()
    _repeated: RepeatedCall | None = None

    def take_step(self, **of_the_step: Any) -> CloseUpStep:
        """As the recorder's. One call is repeated, now that the step's time is taken."""
        step = super().take_step(**of_the_step)
        values = {field.name: getattr(step, field.name) for field in fields(StepProfile)}
        values["overhead_s"] += self._copying_s
        logits, self._logits, self._copying_s = self._logits, None, 0.0
        return CloseUpStep(**values, calls=self._close_ups, logits=logits, repeated=self._repeated)

    def _timed_calls(self, began_s: float) -> list[TimedCall]:
        timed = super()._timed_calls(began_s)
        self._close_ups = tuple(map(_call_profile, timed))
        self._repeated = self._repeat(self._close_ups)
        return timed

    def run(self, op: Op, args: tuple[Any, ...]) -> Any:
        if op.place is Place.DRAW:
            start = self._clock()
            self._logits = self.inner.download(op.argument("logits", args))  # before the sampler consumes them
            self._copying_s += self._clock() - start
        return super().run(op, args)

    def _repeat(self, calls: tuple[CallProfile, ...]) -> RepeatedCall | None:
        """Of the call that streams most, of those that fit into caches; if none does, of the one that streams least."""
        harmless = [i for i, call in enumerate(calls) if OPS[call.op.name].is_repeatable]
        if self.inner.num_threads == 0 or not harmless:
            return None

        def fit(i: int) -> tuple[bool, int]:
            nbytes = calls[i].op.weight_bytes
            return nbytes <= _CACHEABLE_BYTES, nbytes if nbytes <= _CACHEABLE_BYTES else -nbytes

        best = max(map(fit, harmless))
        equals = [i for i in harmless if fit(i) == best]
        in_step_time_s = median(calls[i].op.time_s for i in equals)
        return RepeatedCall(calls[equals[0]], in_step_time_s, self._repeated_time_s(equals[0]))

    def _repeated_time_s(self, index: int) -> float:
        op, _, args, _, _ = self._calls[index]
        call = getattr(self.inner, op.name)
        times = []
        for _ in range(_REPETITIONS):
            start = self._clock()
            call(*args)
            times.append(self._clock() - start)
        return max(median(times) - self._inside_s, 0.0)


def _call_profile(call: TimedCall) -> CallProfile:
    op, args = OPS[call.name], call.args
    return CallProfile(call.op, _matrix(args), _named(op, op.source, args), _named(op, op.written[0], args))


def _named(op: Op, parameter: str, args: tuple[Any, ...]) -> NamedShape:
    value = op.argument(parameter, args)
    match value:
        case KVCacheLayer():
            value = value.k
        case Sampled():
            value = value.token_ids
    return NamedShape(parameter, tuple(value.shape))


def _matrix(args: tuple[Any, ...]) -> Matrix | None:
    """The matrix that a call streams, by itself or as a part of its layer."""
    weight = None
    for arg in args:
        match arg:
            case Weight():
                weight = arg
            case Layer():
                weight = arg.qkv_proj
            case GatedMlp():
                weight = arg.gate_up_proj
    if weight is None:
        return None
    formats = tuple(dict.fromkeys(segment.format.name for segment in weight.segments))
    return Matrix(weight.name, weight.shape, formats, weight.nbytes)
