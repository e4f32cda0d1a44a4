"""The journey of a token's bytes: how many pass each level between memory and arithmetic, by formula."""

from __future__ import annotations

from dataclasses import dataclass

from numba_engine.profiling.phases import PhaseProfile

_CPU_LEVELS = ("main memory", "caches", "registers")
_GPU_LEVELS = ("device memory", "L2 cache", "shared memory, L1", "registers")


@dataclass(frozen=True, slots=True)
class JourneyLevel:
    """What passes one level for one generated token, in bytes."""

    name: str
    weight_bytes: float
    kv_bytes: float
    activation_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


def token_journey(decode: PhaseProfile, backend: str) -> tuple[JourneyLevel, ...]:
    """The levels from memory inwards, of the mean generated token, with the traffic of an ideal kernel.

    Weights and KV come from memory for each step anew, shared by its sequences; activations are small enough to stay in
    the caches; all of it passes every level further in once.
    """
    weights = sum(op.weight_bytes for op in decode.ops) / decode.num_tokens
    kv = sum(op.kv_bytes for op in decode.ops) / decode.num_tokens
    activations = sum(op.activation_bytes for op in decode.ops) / decode.num_tokens
    memory, *inner = _CPU_LEVELS if backend == "cpu" else _GPU_LEVELS
    return (
        JourneyLevel(memory, weights, kv, 0.0),
        *(JourneyLevel(name, weights, kv, activations) for name in inner),
    )
