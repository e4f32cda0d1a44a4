"""The least time and the memory that a model needs on a GPU (Williams et al., Roofline, CACM 2009).

A forward pass takes at least the time to move its bytes and at least the time to do its arithmetic; the longer of the
two, plus what the links between GPUs take, is the bound. No engine can be faster; a good one comes near.

- Bytes and FLOPs are those of ``traffic.py``: weights once a pass, KV once a KV head and sequence. Activations are
  taken to stay in the L2 cache, and sampling to cost nothing.
- Prefill is one pass over the prompts of all sequences, decode one pass that adds a token to each (with speculation:
  verifies a draft of each).
- Under tensor parallelism each GPU holds its share of every matrix; two all-reduces of the hidden state a layer lie
  between dependent kernels, so their time adds (Shoeybi et al., Megatron-LM, 2019).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import Any

from numba_engine.profiling.hardware import Gpu, Link, NumberFormat
from numba_engine.profiling.planned_model import Demand, PlannedModel
from numba_engine.profiling.workload import Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """A model, on a GPU, run in one way."""

    model: PlannedModel
    gpu: Gpu
    workload: Workload

    @property
    def weight_format(self) -> NumberFormat:
        return self.model.weight_format(self.workload)

    @property
    def bandwidth(self) -> float:
        """Bytes a second, of one GPU."""
        return self.gpu.bandwidth_gbps * 1e9

    def but(self, **changes: Any) -> Plan:
        """The same with other values in fields of the workload."""
        return replace(self, workload=replace(self.workload, **changes))

    def demand(self, query_len: int) -> Demand:
        return self.model.demand(self.workload, query_len)


class Bound(enum.StrEnum):
    """What takes longest."""

    MEMORY = "MEMORY"
    COMPUTE = "COMPUTE"
    INTERCONNECT = "INTERCONNECT"


@dataclass(frozen=True, slots=True)
class PassTime:
    """The least time of one forward pass, by what it is spent on. Memory and arithmetic overlap, links do not."""

    memory_s: float
    compute_s: float
    """0 where the GPU's arithmetic rate is not known."""
    link_s: float

    @property
    def time_s(self) -> float:
        return max(self.memory_s, self.compute_s) + self.link_s

    @property
    def bound(self) -> Bound:
        if self.link_s > max(self.memory_s, self.compute_s):
            return Bound.INTERCONNECT
        return Bound.COMPUTE if self.compute_s > self.memory_s else Bound.MEMORY


# ---- phases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Phase:
    """Prefill, or decode."""

    demand: Demand
    pass_time: PassTime
    """Of one pass of the model."""
    round_s: float
    """Of one pass and, with speculation, its drafts."""
    time_per_token_s: float
    """Decode: between two tokens of a sequence. Prefill: round_s over a prompt's tokens."""
    tokens_per_s: float
    """Of all sequences together."""
    share_of_tensor_peak: float | None
    """Of the GPU's arithmetic for this weight format; None where a rate is not known."""
    share_of_shader_fp16_peak: float | None
    """Of its fp16 arithmetic outside the tensor cores; above 1 where only tensor cores can be as fast as the bound."""


def decode_phase(plan: Plan) -> Phase:
    """One token more for each sequence, at the workload's context."""
    demand = plan.demand(plan.workload.decode_query_len)
    drafts_s, tokens_per_sequence = 0.0, 1.0
    speculation = plan.workload.speculation
    if speculation is not None:
        single_s = pass_time(plan, plan.demand(1)).time_s
        drafts_s = speculation.draft_len * speculation.draft_cost * single_s
        tokens_per_sequence = speculation.tokens_per_pass
    return _phase(plan, demand, tokens_per_sequence, drafts_s)


def prefill_phase(plan: Plan) -> Phase:
    """The prompts of all sequences, ``context`` tokens each, in one pass: the least time to the first token."""
    return _phase(plan, plan.demand(plan.workload.context), plan.workload.context)


def _phase(plan: Plan, demand: Demand, tokens_per_sequence: float, drafts_s: float = 0.0) -> Phase:
    one_pass = pass_time(plan, demand)
    round_s = one_pass.time_s + drafts_s
    achieved = demand.flops / round_s
    tensor_peak = plan.gpu.peak_flops(plan.weight_format.arithmetic)
    shader_peak = plan.gpu.shader_fp16_tflops
    return Phase(
        demand=demand,
        pass_time=one_pass,
        round_s=round_s,
        time_per_token_s=round_s / tokens_per_sequence,
        tokens_per_s=plan.workload.batch * tokens_per_sequence / round_s,
        share_of_tensor_peak=achieved / tensor_peak if tensor_peak else None,
        share_of_shader_fp16_peak=achieved / (shader_peak * 1e12) if shader_peak else None,
    )


def pass_time(plan: Plan, demand: Demand) -> PassTime:
    """Of a pass that asks so much of each GPU."""
    return PassTime(
        memory_s=demand.memory_bytes / plan.bandwidth,
        compute_s=_compute_s(plan, demand),
        link_s=_link_s(plan, demand),
    )


def _compute_s(plan: Plan, demand: Demand) -> float:
    arithmetic = plan.weight_format.arithmetic
    matrix_peak, attention_peak = plan.gpu.peak_flops(arithmetic), plan.gpu.attention_flops(arithmetic)
    if matrix_peak is None or attention_peak is None:
        return 0.0
    return demand.matrix_flops / matrix_peak + demand.attention_flops / attention_peak


def _link_s(plan: Plan, demand: Demand) -> float:
    tp = plan.workload.tp
    if tp == 1:
        return 0.0
    return demand.num_all_reduces * all_reduce_s(plan.gpu.link(tp), tp, demand.all_reduce_bytes)


def all_reduce_s(link: Link, num_gpus: int, nbytes: float) -> float:
    """The faster of a ring, 2(n-1) steps of 1/n of the bytes, and of each GPU reading all of every other's at once."""
    others = num_gpus - 1
    ring = 2 * others * (nbytes / num_gpus / (link.gbps * 1e9) + link.latency_s)
    direct = others * nbytes / (link.gbps * 1e9) + link.latency_s
    return min(ring, direct)


def ridge_batch(plan: Plan) -> int | None:
    """The smallest batch at which arithmetic takes at least as long as memory.

    Both times are straight lines over the batch: memory starts at the weights and rises with each sequence's KV,
    arithmetic starts at 0. They meet only if arithmetic rises faster.
    """

    def at(batch: int) -> PassTime:
        changed = plan.but(batch=batch)
        return pass_time(changed, changed.demand(changed.workload.decode_query_len))

    one, two = at(1), at(2)
    memory_slope, compute_slope = two.memory_s - one.memory_s, two.compute_s - one.compute_s
    if compute_slope <= memory_slope:
        return None
    crossing = ((one.memory_s - memory_slope) - (one.compute_s - compute_slope)) / (compute_slope - memory_slope)
    return max(1, math.ceil(crossing * (1 - 1e-12)))


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each GPU. Buffers and the runtime come on top: leave 1 or 2 GB."""

    weight_bytes: float
    kv_bytes: float
    kv_bytes_per_token: float
    available_bytes: int
    max_sequences: int | None
    """That fit at this context; None where the KV cache's shape is not known."""
    max_context: int | None
    """That fits at this batch; None where the KV cache's shape is not known."""

    @property
    def total_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.available_bytes


def memory_need(plan: Plan) -> MemoryNeed:
    workload, available_bytes = plan.workload, plan.gpu.memory_bytes
    weight_bytes = plan.model.resident_weight_bytes(workload)
    per_token = plan.model.kv_bytes_per_token(workload)
    room = max(available_bytes - weight_bytes, 0.0)
    return MemoryNeed(
        weight_bytes=weight_bytes,
        kv_bytes=per_token * workload.batch * workload.context,
        kv_bytes_per_token=per_token,
        available_bytes=available_bytes,
        max_sequences=int(room // (per_token * workload.context)) if per_token else None,
        max_context=int(room // (per_token * workload.batch)) if per_token else None,
    )
