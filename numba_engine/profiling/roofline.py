"""The roofline planner: how fast a model can at best run on a GPU, what bounds it, and what each lever would give.

Everything is by formula, from the model's shapes and the GPU's datasheet: ``bounds.py`` says what is counted. Before
there is a GPU, or weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba_engine.errors import ConfigError
from numba_engine.profiling.bounds import MemoryNeed, Phase, Plan, decode_phase, memory_need, prefill_phase, ridge_batch
from numba_engine.profiling.energy import EnergyLevel, token_energy
from numba_engine.profiling.hardware import Gpu
from numba_engine.profiling.levers import Lever, levers
from numba_engine.profiling.planned_model import PlannedModel
from numba_engine.profiling.workload import Workload

MAX_TARGET_TOKENS_PER_S = 10**6
"""Of each sequence."""
_MAX_TARGET_GPUS = 10**6
"""A target that asks for more is no question of bandwidth any longer."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A model on a GPU: all that the planner says. Every figure is by formula from the datasheet."""

    model: str
    num_parameters: int
    weight_format: str
    gpu: Gpu
    workload: Workload
    decode: Phase
    prefill: Phase | None
    """None where the arithmetic rate is not known: memory alone says next to nothing of prefill."""
    memory: MemoryNeed
    machine_balance: float | None
    """FLOPs a byte at which the GPU's arithmetic takes as long as its memory."""
    decode_intensity: float
    """FLOPs a byte of the decode pass."""
    ridge_batch: int | None
    """Smallest batch whose decode pass is bound by arithmetic; None where KV reads keep every batch bound by memory, or
    the arithmetic rate is not known."""
    levers: tuple[Lever, ...]
    energy: tuple[EnergyLevel, ...]
    joules_per_token_at_tdp: float | None
    """TDP times time: what the socket can draw, most of it not for moving these bits."""
    target: Target | None
    notes: tuple[str, ...]

    @property
    def joules_per_token(self) -> float:
        return sum(level.joules for level in self.energy)


@dataclass(frozen=True, slots=True)
class Target:
    """What a wished-for speed of each sequence asks of memory."""

    tokens_per_s: float
    bandwidth_gbps: float
    """Of all GPUs together."""
    num_gpus: int
    """Of this kind, by bandwidth alone."""


def estimate(model: PlannedModel, gpu: Gpu, workload: Workload) -> Estimate:
    """Bounds, memory, ridge, levers and energy of a model on a GPU.

    Raises:
        ConfigError: the model cannot be shared among so many GPUs, or stores no weights that could be kept.
    """
    plan = Plan(model, gpu, workload)
    decode = decode_phase(plan)
    peak = gpu.peak_flops(plan.weight_format.arithmetic)
    return Estimate(
        model=model.name,
        num_parameters=model.num_parameters,
        weight_format=plan.weight_format.name,
        gpu=gpu,
        workload=workload,
        decode=decode,
        prefill=prefill_phase(plan) if peak else None,
        memory=memory_need(plan),
        machine_balance=peak / plan.bandwidth if peak else None,
        decode_intensity=decode.demand.flops / decode.demand.memory_bytes,
        ridge_batch=ridge_batch(plan),
        levers=tuple(levers(plan)),
        energy=token_energy(plan, decode),
        joules_per_token_at_tdp=gpu.tdp_w * workload.tp / decode.tokens_per_s if gpu.tdp_w is not None else None,
        target=None,
        notes=tuple(_notes(plan)),
    )


def with_target(one: Estimate, tokens_per_s: float) -> Estimate:
    """The same, and what so many tokens a second of each sequence ask for.

    Raises:
        ConfigError: the target is out of range, or so far from what the GPU can do that no number of them is an answer.
    """
    require_target(tokens_per_s)
    passes_per_s = tokens_per_s * one.workload.batch / (one.decode.tokens_per_s * one.decode.round_s)
    gbps = one.decode.demand.memory_bytes * one.workload.tp * passes_per_s / 1e9
    num_gpus = max(1, math.ceil(gbps / one.gpu.bandwidth_gbps * (1 - 1e-12)))
    if num_gpus > _MAX_TARGET_GPUS:
        raise ConfigError(
            f"the target must be lower: {tokens_per_s:g} tok/s a sequence ask for {num_gpus:.2g} of {one.gpu.name}, "
            f"more than {_MAX_TARGET_GPUS:,}"
        )
    return replace(one, target=Target(tokens_per_s, gbps, num_gpus))


def require_target(tokens_per_s: float) -> None:
    """Raises ConfigError for a speed that is not in range."""
    if not 0 < tokens_per_s <= MAX_TARGET_TOKENS_PER_S:  # not a number is in no range
        raise ConfigError(
            f"the target must be a positive number of tok/s up to {MAX_TARGET_TOKENS_PER_S:,}, got {tokens_per_s!r}"
        )


def _notes(plan: Plan) -> Iterator[str]:
    model, gpu, workload, weights = plan.model, plan.gpu, plan.workload, plan.weight_format
    if not model.kv_bytes_per_token(workload):
        yield "KV cache and links between GPUs are not counted: a parameter count says nothing of the model's shape"
    if model.max_position is not None and workload.context > model.max_position:
        yield f"context {workload.context:,} exceeds the model's own {model.max_position:,}"
    if gpu.l2_bytes is not None and plan.demand(1).memory_bytes < gpu.l2_bytes:
        yield "what a pass reads fits in the L2 cache: the GPU may be faster than this bound, its memory's"
    if weights.arithmetic in ("fp8", "fp4") and getattr(gpu, f"{weights.arithmetic}_tflops") is None:
        yield f"{gpu.name} has no {weights.arithmetic} units: {weights.name} weights are widened and multiplied in fp16"
    if gpu.peak_flops(weights.arithmetic) is None:
        yield "the arithmetic rate of this machine is not known: only memory bounds decode, nothing is said of prefill"
