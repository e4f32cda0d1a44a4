"""The roofline planner: how fast a model can at best run on a GPU, what bounds it, and what each lever would give.

Everything is by formula, from the model's shapes and the datasheet (Williams et al., Roofline, CACM 2009): a forward
pass takes at least the time to move its bytes and at least the time to do its arithmetic; the longer of the two, plus
what the links between GPUs take, is the bound. No engine can be faster; a good one comes near.

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol, cast

import numpy as np

from numba_engine.backends.base import AttentionShape, Batch, KVCacheLayer, LayerWeights, RopeTable, Weight
from numba_engine.checkpoint import Checkpoint
from numba_engine.errors import ConfigError
from numba_engine.model.config import ModelConfig
from numba_engine.profiling import traffic
from numba_engine.profiling.hardware import (
    KV_FORMATS,
    L2_ENERGY,
    MEMORY_ENERGY,
    MULTIPLY_ADD_ENERGY,
    NEAR_MEMORY_BANDWIDTH_FACTOR,
    NEAR_MEMORY_SOURCE,
    REGISTER_ENERGY,
    SHARED_MEMORY_ENERGY,
    WEIGHT_FORMATS,
    EnergyFigure,
    Gpu,
    Link,
    NumberFormat,
)
from numba_engine.profiling.traffic import Traffic

MAX_BATCH = 1 << 16
MAX_CONTEXT = 1 << 22
MAX_PARAMETERS = 10**15


# ---- the question ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023)."""

    acceptance: float
    """α: how likely the model is to accept a drafted token."""
    draft_len: int = 4
    """γ: tokens drafted a pass."""
    draft_cost: float = 0.05
    """c: time of the drafter's pass over the model's. The paper's drafters stayed below 0.05."""

    def __post_init__(self) -> None:
        _require(0 <= self.acceptance <= 1, "the acceptance rate", "0 to 1", self.acceptance)
        _require(1 <= self.draft_len <= 64, "the draft length", "1 to 64", self.draft_len)
        _require(0 <= self.draft_cost <= 1, "the draft cost", "0 to 1", self.draft_cost)

    @property
    def tokens_per_pass(self) -> float:
        """Expected tokens that one pass of the model yields: (1 - α^(γ+1)) / (1 - α), equation 1."""
        if self.acceptance == 1:
            return self.draft_len + 1.0
        return float((1 - self.acceptance ** (self.draft_len + 1)) / (1 - self.acceptance))


@dataclass(frozen=True, slots=True)
class Workload:
    """How the model is run."""

    weights: NumberFormat | None = WEIGHT_FORMATS["fp16"]
    """None: as the checkpoint stores them."""
    kv: NumberFormat = KV_FORMATS["fp16"]
    batch: int = 1
    """Sequences at once."""
    context: int = 1024
    """Tokens a sequence has in the cache in a decode step; tokens of its prompt in prefill."""
    tp: int = 1
    """GPUs that share every matrix."""
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.batch <= MAX_BATCH, "batch", f"1 to {MAX_BATCH}", self.batch)
        _require(1 <= self.context <= MAX_CONTEXT, "context", f"1 to {MAX_CONTEXT}", self.context)
        _require(1 <= self.tp <= 1024, "tp", "1 to 1024", self.tp)

    @property
    def decode_query_len(self) -> int:
        """Tokens of each sequence in a decode pass: with speculation the draft and one more."""
        return 1 if self.speculation is None else self.speculation.draft_len + 1


# ---- the answer ------------------------------------------------------------------------------------------------------


class Bound(enum.StrEnum):
    """What takes longest."""

    MEMORY = "MEMORY"
    COMPUTE = "COMPUTE"
    INTERCONNECT = "INTERCONNECT"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one forward pass asks of one GPU."""

    weight_bytes: float
    kv_bytes: float
    """Read and written."""
    activation_bytes: float
    """Between the phases, in L2."""
    matrix_flops: float
    """All but attention's."""
    attention_flops: float
    all_reduce_bytes: float = 0.0
    """Of one all-reduce."""
    num_all_reduces: int = 0

    @property
    def memory_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def flops(self) -> float:
        return self.matrix_flops + self.attention_flops


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


@dataclass(frozen=True, slots=True)
class Lever:
    """One thing that could be changed, and what the bound would be then."""

    name: str
    change: str
    metric: str
    tokens_per_s: float
    factor: float
    """Of tokens_per_s, over the same without the change."""
    bound: Bound
    memory_bytes: float
    fits: bool
    source: str = "by formula"


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


@dataclass(frozen=True, slots=True)
class Target:
    """What a wished-for speed of each sequence asks of memory."""

    tokens_per_s: float
    bandwidth_gbps: float
    """Of all GPUs together."""
    num_gpus: int
    """Of this kind, by bandwidth alone."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A model on a GPU: all that the planner says. Every figure is by formula from the datasheet."""

    model: str
    num_parameters: int
    weight_format: str
    gpu: Gpu
    workload: Workload
    decode: Phase
    prefill: Phase
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


def estimate(model: PlannedModel, gpu: Gpu, workload: Workload, target_tokens_per_s: float | None = None) -> Estimate:
    """Bounds, memory, ridge, levers and energy of a model on a GPU.

    Raises:
        ConfigError: the model cannot be shared among so many GPUs, or stores no weights that could be kept.
    """
    decode = decode_phase(model, gpu, workload)
    weights = model.weight_format(workload)
    peak = gpu.peak_flops(weights.arithmetic)
    return Estimate(
        model=model.name,
        num_parameters=model.num_parameters,
        weight_format=weights.name,
        gpu=gpu,
        workload=workload,
        decode=decode,
        prefill=prefill_phase(model, gpu, workload),
        memory=memory_need(model, gpu, workload),
        machine_balance=peak / (gpu.bandwidth_gbps * 1e9) if peak else None,
        decode_intensity=decode.demand.flops / decode.demand.memory_bytes,
        ridge_batch=ridge_batch(model, gpu, workload),
        levers=tuple(_levers(model, gpu, workload)),
        energy=_energy(decode, gpu, workload, weights),
        joules_per_token_at_tdp=gpu.tdp_w * workload.tp / decode.tokens_per_s if gpu.tdp_w is not None else None,
        target=None if target_tokens_per_s is None else _target(decode, gpu, workload, target_tokens_per_s),
        notes=tuple(_notes(model, gpu, workload)),
    )


def estimate_as_json(result: Estimate) -> dict[str, Any]:
    """Every field and derived figure, as plain JSON values."""
    values = cast(dict[str, Any], _plain(result))
    values["basis"] = "by formula from the datasheet; energy figures are estimates"
    return values


def _plain(value: Any) -> Any:
    """Dataclasses become objects of their fields and properties."""
    if hasattr(value, "__dataclass_fields__"):
        names = [field.name for field in fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


# ---- phases ----------------------------------------------------------------------------------------------------------


def decode_phase(model: PlannedModel, gpu: Gpu, workload: Workload) -> Phase:
    """One token more for each sequence, at the workload's context."""
    demand = model.demand(workload, workload.decode_query_len)
    pass_time = _pass_time(model, gpu, workload, demand)
    round_s, tokens_per_sequence = pass_time.time_s, 1.0
    if workload.speculation is not None:
        single = _pass_time(model, gpu, workload, model.demand(workload, 1)).time_s
        round_s += workload.speculation.draft_len * workload.speculation.draft_cost * single
        tokens_per_sequence = workload.speculation.tokens_per_pass
    return _phase(model, gpu, workload, demand, pass_time, round_s, tokens_per_sequence)


def prefill_phase(model: PlannedModel, gpu: Gpu, workload: Workload) -> Phase:
    """The prompts of all sequences, ``context`` tokens each, in one pass: the least time to the first token."""
    demand = model.demand(workload, workload.context)
    pass_time = _pass_time(model, gpu, workload, demand)
    return _phase(model, gpu, workload, demand, pass_time, pass_time.time_s, workload.context)


def _phase(
    model: PlannedModel,
    gpu: Gpu,
    workload: Workload,
    demand: Demand,
    pass_time: PassTime,
    round_s: float,
    tokens_per_sequence: float,
) -> Phase:
    achieved = demand.flops / round_s
    tensor_peak = gpu.peak_flops(model.weight_format(workload).arithmetic)
    shader_peak = gpu.shader_fp16_tflops
    return Phase(
        demand=demand,
        pass_time=pass_time,
        round_s=round_s,
        time_per_token_s=round_s / tokens_per_sequence,
        tokens_per_s=workload.batch * tokens_per_sequence / round_s,
        share_of_tensor_peak=achieved / tensor_peak if tensor_peak else None,
        share_of_shader_fp16_peak=achieved / (shader_peak * 1e12) if shader_peak else None,
    )


def _pass_time(model: PlannedModel, gpu: Gpu, workload: Workload, demand: Demand) -> PassTime:
    return PassTime(
        memory_s=demand.memory_bytes / (gpu.bandwidth_gbps * 1e9),
        compute_s=_compute_s(gpu, demand, model.weight_format(workload)),
        link_s=demand.num_all_reduces * all_reduce_s(gpu.link(workload.tp), workload.tp, demand.all_reduce_bytes)
        if workload.tp > 1
        else 0.0,
    )


def _compute_s(gpu: Gpu, demand: Demand, weights: NumberFormat) -> float:
    """Attention multiplies in fp16 whatever the weights are."""
    matrix_peak, attention_peak = gpu.peak_flops(weights.arithmetic), gpu.peak_flops("fp16")
    if matrix_peak is None or attention_peak is None:
        return 0.0
    return demand.matrix_flops / matrix_peak + demand.attention_flops / attention_peak


def all_reduce_s(link: Link, num_gpus: int, nbytes: float) -> float:
    """The faster of a ring, 2(n-1) steps of 1/n of the bytes, and of each GPU reading all of every other's at once."""
    others = num_gpus - 1
    ring = 2 * others * (nbytes / num_gpus / (link.gbps * 1e9) + link.latency_s)
    direct = others * nbytes / (link.gbps * 1e9) + link.latency_s
    return min(ring, direct)


def ridge_batch(model: PlannedModel, gpu: Gpu, workload: Workload) -> int | None:
    """The smallest batch at which arithmetic takes at least as long as memory.

    Both times are straight lines over the batch: memory starts at the weights and rises with each sequence's KV,
    arithmetic starts at 0. They meet only if arithmetic rises faster.
    """

    def times(batch: int) -> PassTime:
        at = replace(workload, batch=batch)
        return _pass_time(model, gpu, at, model.demand(at, at.decode_query_len))

    one, two = times(1), times(2)
    memory_slope, compute_slope = two.memory_s - one.memory_s, two.compute_s - one.compute_s
    if compute_slope <= memory_slope:
        return None
    crossing = ((one.memory_s - memory_slope) - (one.compute_s - compute_slope)) / (compute_slope - memory_slope)
    return max(1, math.ceil(crossing * (1 - 1e-12)))


def memory_need(model: PlannedModel, gpu: Gpu, workload: Workload) -> MemoryNeed:
    weight_bytes = model.resident_weight_bytes(workload)
    per_token = model.kv_bytes_per_token(workload)
    max_sequences = max_context = None
    if per_token:
        room = max(gpu.memory_bytes - weight_bytes, 0.0)
        max_sequences = int(room // (per_token * workload.context))
        max_context = int(room // (per_token * workload.batch))
    return MemoryNeed(
        weight_bytes=weight_bytes,
        kv_bytes=per_token * workload.batch * workload.context,
        kv_bytes_per_token=per_token,
        available_bytes=gpu.memory_bytes,
        max_sequences=max_sequences,
        max_context=max_context,
    )


# ---- levers ----------------------------------------------------------------------------------------------------------

_RESERVED_KV_USE = 0.382
_PAGED_SOURCE = (
    "by formula, share in use without pages: at most 38.2 % (Kwon et al., Efficient Memory Management for Large "
    "Language Model Serving with PagedAttention, SOSP 2023, section 1)"
)
_FLASH_SOURCE = "by formula, algorithms 0 and 1 of Dao et al., FlashAttention, 2022"
_SPECULATIVE_SOURCE = "by formula, Leviathan et al. 2023"
_ASSUMED_ACCEPTANCE = 0.8


def _levers(model: PlannedModel, gpu: Gpu, workload: Workload) -> Iterator[Lever]:
    yield from _quantisation(model, gpu, workload)
    yield from _batching(model, gpu, workload)
    yield from _attention(model, gpu, workload)
    yield from _kv_management(model, gpu, workload)
    yield _speculation(model, gpu, workload)
    yield from _tensor_parallelism(model, gpu, workload)
    yield _near_memory(model, gpu, workload)


def _quantisation(model: PlannedModel, gpu: Gpu, workload: Workload) -> Iterator[Lever]:
    half = "fp8" if gpu.fp8_tflops else "int8"
    for name in (half, "q4_0"):
        if WEIGHT_FORMATS[name].bits < model.weight_format(workload).bits:
            changed = replace(workload, weights=WEIGHT_FORMATS[name])
            yield _decode_lever("quantisation", f"weights in {name}", model, gpu, workload, changed)


def _batching(model: PlannedModel, gpu: Gpu, workload: Workload) -> Iterator[Lever]:
    ridge = ridge_batch(model, gpu, workload)
    sizes = {workload.batch * 8: f"{workload.batch * 8} sequences at once"}
    if ridge is not None and ridge > workload.batch:
        sizes[ridge] = f"{ridge} sequences at once, the ridge"
    for batch, change in sorted(sizes.items()):
        if batch <= MAX_BATCH:
            yield _decode_lever("batching", change, model, gpu, workload, replace(workload, batch=batch))


def _attention(model: PlannedModel, gpu: Gpu, workload: Workload) -> Iterator[Lever]:
    if not model.kv_bytes_per_token(workload):
        return
    with_it = prefill_phase(model, gpu, workload)
    # Scores and probabilities, each written once and read once. The attention kernels wait for those before them, so
    # that their memory time overlaps with no arithmetic but their own.
    scores_s = 4 * model.score_bytes(workload) / (gpu.bandwidth_gbps * 1e9)
    peak = gpu.peak_flops("fp16")
    attention_s = with_it.demand.attention_flops / peak if peak else 0.0
    without_s = with_it.round_s + max(0.0, scores_s - attention_s)
    need = memory_need(model, gpu, workload)
    yield Lever(
        "FlashAttention",
        "counted in all figures; factor over writing the scores to memory",
        "prefill",
        with_it.tokens_per_s,
        without_s / with_it.round_s,
        with_it.pass_time.bound,
        need.total_bytes,
        need.fits,
        _FLASH_SOURCE,
    )
    if workload.kv.bits > 8:
        changed = replace(workload, kv=KV_FORMATS["fp8"])
        yield _decode_lever("KV format", "keys and values in fp8", model, gpu, workload, changed)


def _kv_management(model: PlannedModel, gpu: Gpu, workload: Workload) -> Iterator[Lever]:
    need = memory_need(model, gpu, workload)
    if not need.max_sequences:
        return
    paged = min(need.max_sequences, MAX_BATCH)
    reserved = max(1, int(paged * _RESERVED_KV_USE))
    changed = replace(workload, batch=paged)
    yield _decode_lever(
        "KV management",
        f"pages: {paged} sequences fit; {reserved} where each reserves its longest context",
        model,
        gpu,
        replace(workload, batch=reserved),
        changed,
        source=_PAGED_SOURCE,
    )


def _speculation(model: PlannedModel, gpu: Gpu, workload: Workload) -> Lever:
    speculation = workload.speculation or Speculation(_ASSUMED_ACCEPTANCE)
    given = "" if workload.speculation else "assuming "
    change = f"{given}α {speculation.acceptance:g}, γ {speculation.draft_len}, c {speculation.draft_cost:g}"
    without = replace(workload, speculation=None)
    changed = replace(workload, speculation=speculation)
    return _decode_lever("speculative decoding", change, model, gpu, without, changed, source=_SPECULATIVE_SOURCE)


def _tensor_parallelism(model: PlannedModel, gpu: Gpu, workload: Workload) -> Iterator[Lever]:
    for tp in (2, 4, 8):
        if tp <= workload.tp or not model.can_be_shared(tp) or tp > gpu.max_gpus:
            continue
        change = f"{tp} GPUs over {gpu.link(tp).name}"
        yield _decode_lever("tensor parallelism", change, model, gpu, workload, replace(workload, tp=tp))


def _near_memory(model: PlannedModel, gpu: Gpu, workload: Workload) -> Lever:
    """Weights and KV are multiplied where they are stored: more bandwidth, but no reuse of a value once read.

    A pass over several tokens therefore reads the weights again for each, and arithmetic bounds nothing: the units do
    one multiply-add for each value that the wider bus brings.
    """
    now = decode_phase(model, gpu, workload)
    demand = model.demand(workload, 1)
    bandwidth = gpu.bandwidth_gbps * 1e9 * NEAR_MEMORY_BANDWIDTH_FACTOR
    memory_s = (demand.weight_bytes * workload.batch + demand.kv_bytes) / bandwidth
    pass_time = replace(_pass_time(model, gpu, workload, demand), memory_s=memory_s, compute_s=0.0)
    need = memory_need(model, gpu, workload)
    tokens_per_s = workload.batch / pass_time.time_s
    return Lever(
        "near-memory compute",
        f"what if: {NEAR_MEMORY_BANDWIDTH_FACTOR:g} × the bandwidth inside the memory, no reuse across a batch",
        "decode",
        tokens_per_s,
        tokens_per_s / now.tokens_per_s,
        pass_time.bound,
        need.total_bytes,
        need.fits,
        NEAR_MEMORY_SOURCE,
    )


def _decode_lever(
    name: str,
    change: str,
    model: PlannedModel,
    gpu: Gpu,
    workload: Workload,
    changed: Workload,
    source: str = "by formula",
) -> Lever:
    before, after = decode_phase(model, gpu, workload), decode_phase(model, gpu, changed)
    need = memory_need(model, gpu, changed)
    factor = after.tokens_per_s / before.tokens_per_s
    bound = after.pass_time.bound
    return Lever(name, change, "decode", after.tokens_per_s, factor, bound, need.total_bytes, need.fits, source)


# ---- energy, target, notes -------------------------------------------------------------------------------------------


def _energy(decode: Phase, gpu: Gpu, workload: Workload, weights: NumberFormat) -> tuple[EnergyLevel, ...]:
    """Each byte from memory passes each level on its way once, and is written to and read from a register.

    Links and the drafter of speculative decoding are not counted.
    """
    passes_per_token = workload.tp / (decode.tokens_per_s * decode.round_s)
    from_memory = decode.demand.memory_bytes * passes_per_token
    through_l2 = from_memory + decode.demand.activation_bytes * passes_per_token

    def moved(level: str, nbytes: float, figure: EnergyFigure) -> EnergyLevel:
        joules = nbytes * 8 * figure.picojoules * 1e-12
        return EnergyLevel(level, nbytes, "bytes", figure.picojoules, joules, figure.source, figure.detail)

    figure = MULTIPLY_ADD_ENERGY[weights.arithmetic]
    multiply_adds = decode.demand.flops / 2 * passes_per_token
    return (
        moved(f"device memory ({gpu.memory_kind})", from_memory, MEMORY_ENERGY[gpu.memory_kind]),
        moved("L2 cache", through_l2, L2_ENERGY),
        moved("shared memory", through_l2, SHARED_MEMORY_ENERGY),
        moved("registers", 2 * through_l2, REGISTER_ENERGY),
        EnergyLevel(
            f"arithmetic ({weights.arithmetic})",
            multiply_adds,
            "multiply-adds",
            figure.picojoules,
            multiply_adds * figure.picojoules * 1e-12,
            figure.source,
            figure.detail,
        ),
    )


def _target(decode: Phase, gpu: Gpu, workload: Workload, tokens_per_s: float) -> Target:
    if not (math.isfinite(tokens_per_s) and tokens_per_s > 0):
        raise ConfigError(f"the target must be a positive number of tok/s, got {tokens_per_s!r}")
    passes_per_s = tokens_per_s * workload.batch / (decode.tokens_per_s * decode.round_s)
    gbps = decode.demand.memory_bytes * workload.tp * passes_per_s / 1e9
    return Target(tokens_per_s, gbps, max(1, math.ceil(gbps / gpu.bandwidth_gbps * (1 - 1e-12))))


def _notes(model: PlannedModel, gpu: Gpu, workload: Workload) -> Iterator[str]:
    if not model.kv_bytes_per_token(workload):
        yield "KV cache and links between GPUs are not counted: a parameter count says nothing of the model's shape"
    if model.max_position is not None and workload.context > model.max_position:
        yield f"context {workload.context:,} exceeds the model's own {model.max_position:,}"
    if gpu.l2_bytes is not None and model.demand(workload, 1).memory_bytes < gpu.l2_bytes:
        yield "what a pass reads fits in the L2 cache: the GPU may be faster than this bound, its memory's"
    weights = model.weight_format(workload)
    if weights.arithmetic in ("fp8", "fp4") and getattr(gpu, f"{weights.arithmetic}_tflops") is None:
        yield f"{gpu.name} has no {weights.arithmetic} units: {weights.name} weights are widened and multiplied in fp16"
    if gpu.peak_flops(weights.arithmetic) is None:
        yield "the arithmetic rate of this machine is not known: only memory bounds the figures, prefill's too"


# ---- models ----------------------------------------------------------------------------------------------------------


class PlannedModel(Protocol):
    """What the planner asks of a model."""

    @property
    def name(self) -> str: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def max_position(self) -> int | None: ...
    def weight_format(self, workload: Workload) -> NumberFormat: ...
    def demand(self, workload: Workload, query_len: int) -> Demand:
        """Of one pass on one GPU: ``query_len`` new tokens, the last of their context, for each sequence."""

    def resident_weight_bytes(self, workload: Workload) -> float:
        """On one GPU."""

    def kv_bytes_per_token(self, workload: Workload) -> float:
        """On one GPU; 0 where the shape is not known."""

    def score_bytes(self, workload: Workload) -> float:
        """The attention scores of a prefill in fp16, all layers, on one GPU."""

    def can_be_shared(self, tp: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class KVShape:
    """What attention and all-reduces need to know of a model given by its parameter count."""

    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _require(1 <= value <= 1 << 20, name, f"1 to {1 << 20}", value)


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """A model of which only the number of parameters is known: every pass reads and uses all of them."""

    num_parameters: int
    shape: KVShape | None = None

    def __post_init__(self) -> None:
        _require(
            1 <= self.num_parameters <= MAX_PARAMETERS, "params", f"1 to {MAX_PARAMETERS:.0e}", self.num_parameters
        )

    @property
    def name(self) -> str:
        return f"{self.num_parameters / 1e9:g}B parameters"

    @property
    def max_position(self) -> int | None:
        return None

    def weight_format(self, workload: Workload) -> NumberFormat:
        if workload.weights is None:
            raise ConfigError("a parameter count says nothing of how the weights are stored; give a weight format")
        return workload.weights

    def demand(self, workload: Workload, query_len: int) -> Demand:
        num_tokens = workload.batch * query_len
        kv_values = attention_flops = 0.0
        if self.shape is not None:
            context = max(workload.context, query_len)
            pairs, visible = traffic.visible_tokens(np.array([query_len]), np.array([context]), None)
            kv_values = workload.batch * (visible + query_len) * self._kv_values_per_token(workload.tp)
            attention_flops = (
                4.0 * workload.batch * pairs * self.shape.hidden_size * self.shape.num_layers / workload.tp
            )
        return Demand(
            weight_bytes=self.resident_weight_bytes(workload),
            kv_bytes=workload.kv.nbytes(kv_values),
            activation_bytes=0.0,
            matrix_flops=2.0 * self.num_parameters * num_tokens / workload.tp,
            attention_flops=attention_flops,
            all_reduce_bytes=2.0 * num_tokens * self.shape.hidden_size if self.shape else 0.0,
            num_all_reduces=2 * self.shape.num_layers if self.shape and workload.tp > 1 else 0,
        )

    def resident_weight_bytes(self, workload: Workload) -> float:
        return self.weight_format(workload).nbytes(self.num_parameters) / workload.tp

    def kv_bytes_per_token(self, workload: Workload) -> float:
        return workload.kv.nbytes(self._kv_values_per_token(workload.tp))

    def score_bytes(self, workload: Workload) -> float:
        if self.shape is None:
            return 0.0
        heads = self.shape.hidden_size / self.shape.head_dim / workload.tp
        return 2.0 * workload.batch * workload.context**2 * heads * self.shape.num_layers

    def can_be_shared(self, tp: int) -> bool:
        return self.shape is None or _shares_kv_heads(self.shape.num_kv_heads, tp)

    def _kv_values_per_token(self, tp: int) -> float:
        if self.shape is None:
            return 0.0
        if not self.can_be_shared(tp):
            raise ConfigError(f"{self.shape.num_kv_heads} KV heads cannot be shared among tp = {tp} GPUs")
        return 2.0 * self.shape.num_layers * max(1, self.shape.num_kv_heads // tp) * self.shape.head_dim


@dataclass(frozen=True, slots=True)
class StoredBits:
    """Bits a value of a checkpoint's tensors, in the mean of each group: what mixed formats come to."""

    label: str
    arithmetic_of: NumberFormat
    embed_tokens: float
    lm_head: float
    matrices: float
    vectors: float


@dataclass(frozen=True, slots=True)
class Transformer:
    """A model whose shapes are known, from a config or a checkpoint."""

    name: str
    config: ModelConfig
    stored: StoredBits | None = None
    """None where there is no checkpoint: then the workload says how weights are stored."""

    @property
    def num_parameters(self) -> int:
        c = self.config
        per_layer = sum(rows * columns for rows, columns in _layer_shapes(c).values()) + _layer_vector_values(c)
        tables = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
        return c.num_layers * per_layer + tables + c.hidden_size

    @property
    def max_position(self) -> int | None:
        return self.config.max_position

    def weight_format(self, workload: Workload) -> NumberFormat:
        if workload.weights is not None:
            return workload.weights
        if self.stored is None:
            raise ConfigError("a config says nothing of how the weights are stored; give a weight format")
        return replace(self.stored.arithmetic_of, name=self.stored.label, bits=self.stored.matrices)

    def demand(self, workload: Workload, query_len: int) -> Demand:
        shard = self._shard(workload.tp)
        counted = _Counted(shard, self._bits(workload), workload.batch, query_len, max(workload.context, query_len))
        rest, attention = counted.without_attention(), counted.attention()
        total = rest + attention
        return Demand(
            weight_bytes=float(total.weight_bytes),
            kv_bytes=workload.kv.nbytes(total.kv_read_bytes + total.kv_written_bytes),  # counted at a byte a value
            activation_bytes=float(total.activation_read_bytes + total.activation_written_bytes),
            matrix_flops=float(rest.flops),
            attention_flops=float(attention.flops),
            all_reduce_bytes=2.0 * workload.batch * query_len * shard.hidden_size,
            num_all_reduces=2 * shard.num_layers if workload.tp > 1 else 0,
        )

    def resident_weight_bytes(self, workload: Workload) -> float:
        c, bits = self._shard(workload.tp), self._bits(workload)
        per_layer = sum(_matrix_bytes(shape, bits.matrices) for shape in _layer_shapes(c).values())
        per_layer += _vector_bytes(_layer_vector_values(c), bits)
        table = (c.vocab_size, c.hidden_size)
        head = 0 if c.tie_word_embeddings else _matrix_bytes(table, bits.lm_head)
        tables = _matrix_bytes(table, bits.embed_tokens) + head
        return float(c.num_layers * per_layer + tables + _vector_bytes(c.hidden_size, bits))

    def kv_bytes_per_token(self, workload: Workload) -> float:
        c = self._shard(workload.tp)
        return workload.kv.nbytes(2 * c.num_layers * c.num_kv_heads * c.head_dim)

    def score_bytes(self, workload: Workload) -> float:
        c = self._shard(workload.tp)
        return 2.0 * workload.batch * workload.context**2 * c.num_heads * c.num_layers

    def can_be_shared(self, tp: int) -> bool:
        c = self.config
        return c.num_heads % tp == 0 and c.intermediate_size % tp == 0 and _shares_kv_heads(c.num_kv_heads, tp)

    def _shard(self, tp: int) -> ModelConfig:
        """What one GPU has of the model. KV heads are repeated where there are more GPUs than heads."""
        c = self.config
        if not self.can_be_shared(tp):
            raise ConfigError(
                f"tp = {tp} must divide {c.num_heads} heads and intermediate_size {c.intermediate_size}, and divide or "
                f"be a multiple of {c.num_kv_heads} KV heads"
            )
        return replace(
            c,
            num_heads=c.num_heads // tp,
            num_kv_heads=max(1, c.num_kv_heads // tp),
            intermediate_size=c.intermediate_size // tp,
            vocab_size=-(-c.vocab_size // tp),
        )

    def _bits(self, workload: Workload) -> StoredBits:
        if workload.weights is None and self.stored is not None:
            return self.stored
        format = self.weight_format(workload)
        vectors = 32.0 if format.bits < 16 else format.bits  # quantised models keep norms and biases in float32
        return StoredBits(format.name, format, format.bits, format.bits, format.bits, vectors)


def transformer_from_checkpoint(checkpoint: Checkpoint) -> Transformer:
    """Shapes and stored bytes of an open checkpoint; of its tensors only the headers are looked at."""
    config = ModelConfig.from_checkpoint(checkpoint)
    table = (config.vocab_size, config.hidden_size)
    nbytes = dict.fromkeys(("embed_tokens", "lm_head", "matrices", "vectors"), 0)
    num_values = dict(nbytes)
    labels: dict[str, int] = {}
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) < 2:
            group = "vectors"
        elif tensor.shape == table:
            group = "embed_tokens" if "embd" in name or "embed" in name else "lm_head"
        else:
            group = "matrices"
        nbytes[group] += tensor.nbytes
        num_values[group] += math.prod(tensor.shape)
        if len(tensor.shape) > 1:
            labels[tensor.format.label] = labels.get(tensor.format.label, 0) + tensor.nbytes
    bits = {group: 8 * nbytes[group] / num_values[group] if num_values[group] else 0.0 for group in nbytes}
    by_size = sorted(labels, key=lambda label: -labels[label])
    format = WEIGHT_FORMATS[{"F32": "fp32", "F16": "fp16"}.get(by_size[0], by_size[0].lower())]
    return Transformer(checkpoint.name, config, StoredBits(", ".join(by_size), format, **bits))


def _shares_kv_heads(num_kv_heads: int, tp: int) -> bool:
    return num_kv_heads % tp == 0 or tp % num_kv_heads == 0


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices of one layer, ``(out_features, in_features)``."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv_proj": (q_size + 2 * kv_size, config.hidden_size),
        "o_proj": (config.hidden_size, q_size),
        "gate_up_proj": (2 * config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
    }


def _layer_vector_values(config: ModelConfig) -> int:
    bias = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim if config.has_qkv_bias else 0
    return 2 * config.hidden_size + bias + (2 * config.head_dim if config.has_qk_norm else 0)


def _matrix_bytes(shape: tuple[int, int], bits: float) -> int:
    return round(shape[0] * shape[1] * bits / 8)


def _vector_bytes(num_values: int, bits: StoredBits) -> int:
    return round(num_values * bits.vectors / 8)


@dataclass(frozen=True, slots=True)
class _Sized:
    """Stands for an array or a weight: the formulas look at nothing else."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int

    def __getitem__(self, rows: slice) -> _Sized:
        raise AssertionError("the formulas look at sizes only")


_HALF = np.dtype(np.float16)
_BLOCK_SIZE = 16


class _Counted:
    """The ops of one forward pass through a model, counted by the formulas of ``traffic.py``."""

    def __init__(self, config: ModelConfig, bits: StoredBits, batch: int, query_len: int, context: int) -> None:
        c = config
        self._config, self._bits = config, bits
        self._num_tokens, self._num_seqs = batch * query_len, batch
        self._shape = AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, c.rms_norm_eps, c.sliding_window)
        # A byte a value: the caller scales to the KV format, which may hold a fraction of one.
        keys = _array((1, c.num_kv_heads, _BLOCK_SIZE, c.head_dim), np.dtype(np.uint8))
        self._cache = KVCacheLayer(keys, keys)
        indices = _array((self._num_tokens,), np.dtype(np.int32))
        self._batch = Batch(
            token_ids=indices,
            positions=indices,
            slot_mapping=indices,
            cu_seqlens_q=np.arange(batch + 1, dtype=np.int64) * query_len,
            context_lens=np.full(batch, context, dtype=np.int64),
            block_tables=indices,
            logit_rows=_array((batch,), np.dtype(np.int32)),
            num_tokens=self._num_tokens,
            num_seqs=batch,
            num_logits=batch,
            max_query_len=query_len,
            max_context_len=context,
        )

    def without_attention(self) -> Traffic:
        """Embedding, all layers but their attention, final norm and head."""
        c = self._config
        hidden = self._rows(c.hidden_size)
        logits = _array((self._num_seqs, c.vocab_size), np.dtype(np.float32))
        last = _array((self._num_seqs, c.hidden_size), _HALF)
        table_shape = (c.vocab_size, c.hidden_size)
        head_bits = self._bits.embed_tokens if c.tie_word_embeddings else self._bits.lm_head
        embedding = traffic.embedding(hidden, self._batch.token_ids, _weight(table_shape, self._bits.embed_tokens))
        head = traffic.norm_lm_head(
            logits,
            last,
            hidden,
            self._batch.logit_rows,
            self._vector(c.hidden_size),
            _weight(table_shape, head_bits),
            c.rms_norm_eps,
        )
        return embedding + _times(self._layer(), c.num_layers) + head

    def attention(self) -> Traffic:
        c = self._config
        out = self._rows(c.num_heads * c.head_dim)
        one_layer = traffic.attention(out, self._qkv(), self._cache, self._batch, self._shape)
        return _times(one_layer, c.num_layers)

    def _layer(self) -> Traffic:
        c = self._config
        hidden, attn_out = self._rows(c.hidden_size), self._rows(c.num_heads * c.head_dim)
        mlp_out, gate_up = self._rows(c.intermediate_size), self._rows(2 * c.intermediate_size)
        weights = self._layer_weights()
        rope = _array((c.max_position, c.head_dim // 2), np.dtype(np.float32))
        counted = traffic.norm_qkv_rope_store(
            self._qkv(), hidden, hidden, weights, self._cache, self._batch, RopeTable(rope, rope), self._shape
        )
        counted += traffic.linear_add(hidden, attn_out, weights.o_proj)
        counted += traffic.norm_gate_up_silu(mlp_out, gate_up, hidden, hidden, weights, c.rms_norm_eps)
        return counted + traffic.linear_add(hidden, mlp_out, weights.down_proj)

    def _layer_weights(self) -> LayerWeights:
        c = self._config
        matrices = {name: _weight(shape, self._bits.matrices) for name, shape in _layer_shapes(c).items()}
        qkv_size = matrices["qkv_proj"].shape[0]
        return LayerWeights(
            input_norm=self._vector(c.hidden_size),
            qkv_bias=self._vector(qkv_size) if c.has_qkv_bias else None,
            q_norm=self._vector(c.head_dim) if c.has_qk_norm else None,
            k_norm=self._vector(c.head_dim) if c.has_qk_norm else None,
            post_attention_norm=self._vector(c.hidden_size),
            **matrices,
        )

    def _qkv(self) -> _Sized:
        c = self._config
        return self._rows((c.num_heads + 2 * c.num_kv_heads) * c.head_dim)

    def _rows(self, features: int) -> _Sized:
        return _array((self._num_tokens, features), _HALF)

    def _vector(self, num_values: int) -> _Sized:
        return _Sized((num_values,), np.dtype(np.float32), _vector_bytes(num_values, self._bits))


def _array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Sized:
    return _Sized(shape, dtype, math.prod(shape) * dtype.itemsize)


def _weight(shape: tuple[int, int], bits: float) -> Weight:
    """Of any format: a ``Weight`` proper knows only those that the engine has kernels for."""
    return cast(Weight, _Sized(shape, _HALF, _matrix_bytes(shape, bits)))


def _times(counted: Traffic, repetitions: int) -> Traffic:
    return Traffic(**{name: value * repetitions for name, value in asdict(counted).items()})


def _require(ok: bool, name: str, allowed: str, value: object) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")
