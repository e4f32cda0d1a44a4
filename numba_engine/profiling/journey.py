"""The journey of a token's bytes: how many pass each level between memory and arithmetic, by formula and as counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numba_engine.backends.instruments import CountedTraffic, KindBytes
from numba_engine.profiling.report import OpProfile

_CPU_LEVELS = ("main memory", "caches", "registers")
_GPU_LEVELS = ("device memory", "L2 cache", "shared memory", "registers")


@dataclass(frozen=True, slots=True)
class JourneyLevel:
    """What passes one level for one generated token, in bytes."""

    name: str
    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    other_bytes: float = 0.0
    """Of kernels' own memory, shared memory included: only counted, no formula knows it."""

    @property
    def total_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.other_bytes


def token_journey(ops: Sequence[OpProfile], num_tokens: int, backend: str) -> tuple[JourneyLevel, ...]:
    """The levels from memory inwards, of the mean of the tokens that the ops generated, as ideal kernels move them.

    Weights and KV come from memory for each step anew, shared by its sequences; activations are small enough to stay in
    the caches; all of it passes the caches and the registers once. What a kernel puts into shared memory is its choice:
    an ideal one needs none.
    """
    weights = sum(op.weight_bytes for op in ops) / num_tokens
    kv = sum(op.kv_bytes for op in ops) / num_tokens
    activations = sum(op.activation_bytes for op in ops) / num_tokens
    whole = (weights, kv, activations)
    if backend == "cpu":
        memory, caches, registers = _CPU_LEVELS
        return JourneyLevel(memory, weights, kv, 0.0), JourneyLevel(caches, *whole), JourneyLevel(registers, *whole)
    memory, l2, shared, registers = _GPU_LEVELS
    return (
        JourneyLevel(memory, weights, kv, 0.0),
        JourneyLevel(l2, *whole),
        JourneyLevel(shared, 0.0, 0.0, 0.0),
        JourneyLevel(registers, *whole),
    )


def counted_journey(ops: Sequence[OpProfile], num_tokens: int) -> tuple[JourneyLevel, ...]:
    """The same levels as the device counted them; empty where it does not count.

    From memory come the bytes of weights and KV that were touched at all; the device counts those of activations too,
    but has no caches to tell whether they leave them.
    """
    counted = [op.counted for op in ops if op.counted is not None]
    if not counted:
        return ()
    total = sum(counted, CountedTraffic())
    memory, l2, shared, registers = _GPU_LEVELS
    return (
        JourneyLevel(memory, total.dram.weights / num_tokens, total.dram.kv / num_tokens, 0.0),
        _level(l2, total.l2, 0, num_tokens),
        JourneyLevel(shared, 0.0, 0.0, 0.0, total.shared_bytes / num_tokens),
        _level(registers, total.lanes, total.shared_bytes, num_tokens),
    )


def _level(name: str, by_kind: KindBytes, shared_bytes: int, num_tokens: int) -> JourneyLevel:
    return JourneyLevel(
        name,
        by_kind.weights / num_tokens,
        by_kind.kv / num_tokens,
        by_kind.activations / num_tokens,
        (by_kind.scratch + shared_bytes) / num_tokens,
    )
