"""The steps of a profile by phase: prefill (any prompt token in the step) and decode apart, each summed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numba_engine.profiling.report import OpProfile, StepProfile, ops_by_name

PREFILL = "prefill"
DECODE = "decode"


@dataclass(frozen=True, slots=True)
class PhaseProfile:
    """All steps of one phase together. Times are without the cost of looking."""

    name: str
    num_steps: int
    num_tokens: int
    """Prompt tokens of prefill, generated tokens of decode."""
    time_s: float
    host_time_s: float
    ops: tuple[OpProfile, ...]
    """In order of first call."""

    def share(self, time_s: float) -> float:
        return time_s / self.time_s if self.time_s else 0.0


def phase_of(step: StepProfile) -> str:
    return PREFILL if step.num_prefill_tokens else DECODE


def phase_profiles(steps: Sequence[StepProfile], decode_seqs: int = 1) -> tuple[PhaseProfile, ...]:
    """Prefill, then decode; a phase without steps is left out.

    So are steps that were not profiled, and decode steps of fewer than ``decode_seqs`` sequences.
    """
    phases = []
    for name in (PREFILL, DECODE):
        of_phase = [
            step
            for step in steps
            if step.profiled and phase_of(step) == name and (name == PREFILL or step.is_decode_of(decode_seqs))
        ]
        if of_phase:
            phases.append(_phase(name, of_phase))
    return tuple(phases)


def _phase(name: str, steps: Sequence[StepProfile]) -> PhaseProfile:
    ops = ops_by_name(steps)
    host_time_s = sum(step.host_time_s for step in steps)
    return PhaseProfile(
        name=name,
        num_steps=len(steps),
        num_tokens=sum(step.num_prefill_tokens if name == PREFILL else step.num_decode_tokens for step in steps),
        time_s=sum(op.time_s for op in ops) + host_time_s,
        host_time_s=host_time_s,
        ops=ops,
    )
