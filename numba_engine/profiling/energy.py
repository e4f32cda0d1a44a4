"""Energy of a generated token, level by level of the machine: estimates from published figures."""

from __future__ import annotations

from dataclasses import dataclass

from numba_engine.profiling.bounds import Phase, Plan
from numba_engine.profiling.hardware import (
    L2_ENERGY,
    MEMORY_ENERGY,
    MULTIPLY_ADD_ENERGY,
    REGISTER_ENERGY,
    SHARED_MEMORY_ENERGY,
    EnergyFigure,
)


@dataclass(frozen=True, slots=True)
class EnergyLevel:
    """Energy of one generated token at one level of the machine, all GPUs together: an estimate."""

    level: str
    count: float
    unit: str
    picojoules: float
    """A bit, or a multiply-add."""
    joules: float
    source: str
    detail: str


def token_energy(plan: Plan, decode: Phase) -> tuple[EnergyLevel, ...]:
    """Each byte from memory passes each level on its way once, and is written to and read from a register.

    Links and the drafter of speculative decoding are not counted.
    """
    passes_per_token = plan.workload.tp / (decode.tokens_per_s * decode.round_s)
    from_memory = decode.demand.memory_bytes * passes_per_token
    through_l2 = from_memory + decode.demand.activation_bytes * passes_per_token
    multiply_adds = decode.demand.flops / 2 * passes_per_token
    kind, arithmetic = plan.gpu.memory_kind, plan.weight_format.arithmetic
    return (
        _moved(f"device memory ({kind})", from_memory, MEMORY_ENERGY[kind]),
        _moved("L2 cache", through_l2, L2_ENERGY),
        _moved("shared memory", through_l2, SHARED_MEMORY_ENERGY),
        _moved("registers", 2 * through_l2, REGISTER_ENERGY),
        _computed(f"arithmetic ({arithmetic})", multiply_adds, MULTIPLY_ADD_ENERGY[arithmetic]),
    )


def _moved(level: str, nbytes: float, figure: EnergyFigure) -> EnergyLevel:
    joules = nbytes * 8 * figure.picojoules * 1e-12
    return EnergyLevel(level, nbytes, "bytes", figure.picojoules, joules, figure.source, figure.detail)


def _computed(level: str, count: float, figure: EnergyFigure) -> EnergyLevel:
    joules = count * figure.picojoules * 1e-12
    return EnergyLevel(level, count, "multiply-adds", figure.picojoules, joules, figure.source, figure.detail)
