"""What could be changed about a plan, each change by itself, and what the bound would be then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba_engine.profiling.bounds import Bound, Plan, decode_phase, memory_need, pass_time, prefill_phase, ridge_batch
from numba_engine.profiling.hardware import (
    KV_FORMATS,
    NEAR_MEMORY_BANDWIDTH_FACTOR,
    NEAR_MEMORY_SOURCE,
    WEIGHT_FORMATS,
)
from numba_engine.profiling.workload import MAX_BATCH, Speculation

_FLASH_SOURCE = "by formula, algorithms 0 and 1 of Dao et al., FlashAttention, 2022"
_PAGED_SOURCE = (
    "by formula, share in use without pages: at most 38.2 % (Kwon et al., Efficient Memory Management for Large "
    "Language Model Serving with PagedAttention, SOSP 2023, section 1)"
)
_RESERVED_KV_USE = 0.382
_SPECULATIVE_SOURCE = "by formula, Leviathan et al. 2023"
_ASSUMED_ACCEPTANCE = 0.8


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


def levers(plan: Plan) -> Iterator[Lever]:
    """Those that are not pulled already."""
    yield from _quantisation(plan)
    yield from _batching(plan)
    yield from _attention(plan)
    yield from _kv_management(plan)
    yield _speculation(plan)
    yield from _tensor_parallelism(plan)
    yield _near_memory(plan)


def _quantisation(plan: Plan) -> Iterator[Lever]:
    for name in ("fp8" if plan.gpu.fp8_tflops else "int8", "q4_0"):
        if WEIGHT_FORMATS[name].bits < plan.weight_format.bits:
            changed = plan.but(weights=WEIGHT_FORMATS[name])
            yield _decode_lever("quantisation", f"weights in {name}", plan, changed)


def _batching(plan: Plan) -> Iterator[Lever]:
    batch, ridge = plan.workload.batch, ridge_batch(plan)
    sizes = {batch * 8: f"{batch * 8} sequences at once"}
    if ridge is not None and ridge > batch:
        sizes[ridge] = f"{ridge} sequences at once, the ridge"
    for size, change in sorted(sizes.items()):
        if size <= MAX_BATCH:
            yield _decode_lever("batching", change, plan, plan.but(batch=size))


def _attention(plan: Plan) -> Iterator[Lever]:
    if not plan.model.kv_bytes_per_token(plan.workload):
        return
    arithmetic = plan.weight_format.arithmetic
    if plan.gpu.peak_flops(arithmetic) and (peak := plan.gpu.attention_flops(arithmetic)):
        yield _flash_attention(plan, peak)
    if plan.workload.kv.bits > 8:
        yield _decode_lever("KV format", "keys and values in fp8", plan, plan.but(kv=KV_FORMATS["fp8"]))


def _flash_attention(plan: Plan, peak: float) -> Lever:
    with_it = prefill_phase(plan)
    # Scores and probabilities, each written once and read once. The attention kernels wait for those before them, so
    # that their memory time overlaps with no arithmetic but their own.
    scores_s = 4 * plan.model.score_bytes(plan.workload) / plan.bandwidth
    without_s = with_it.round_s + max(0.0, scores_s - with_it.demand.attention_flops / peak)
    need = memory_need(plan)
    return Lever(
        name="FlashAttention",
        change="counted in all figures; factor over writing the scores to memory",
        metric="prefill",
        tokens_per_s=with_it.tokens_per_s,
        factor=without_s / with_it.round_s,
        bound=with_it.pass_time.bound,
        memory_bytes=need.total_bytes,
        fits=need.fits,
        source=_FLASH_SOURCE,
    )


def _kv_management(plan: Plan) -> Iterator[Lever]:
    max_sequences = memory_need(plan).max_sequences
    if not max_sequences:
        return
    paged = min(max_sequences, MAX_BATCH)
    reserved = max(1, int(paged * _RESERVED_KV_USE))
    change = f"pages: {paged} sequences fit; {reserved} where each reserves its longest context"
    yield _decode_lever("KV management", change, plan.but(batch=reserved), plan.but(batch=paged), _PAGED_SOURCE)


def _speculation(plan: Plan) -> Lever:
    speculation = plan.workload.speculation or Speculation(_ASSUMED_ACCEPTANCE)
    given = "" if plan.workload.speculation else "assuming "
    change = f"{given}α {speculation.acceptance:g}, γ {speculation.draft_len}, c {speculation.draft_cost:g}"
    without, changed = plan.but(speculation=None), plan.but(speculation=speculation)
    return _decode_lever("speculative decoding", change, without, changed, _SPECULATIVE_SOURCE)


def _tensor_parallelism(plan: Plan) -> Iterator[Lever]:
    for tp in (2, 4, 8):
        if plan.workload.tp < tp <= plan.gpu.max_gpus and plan.model.can_be_shared(tp):
            change = f"{tp} GPUs over {plan.gpu.link(tp).name}"
            yield _decode_lever("tensor parallelism", change, plan, plan.but(tp=tp))


def _near_memory(plan: Plan) -> Lever:
    """Weights and KV are multiplied where they are stored: more bandwidth, but no reuse of a value once read.

    A pass over several tokens therefore reads the weights again for each, and arithmetic bounds nothing: the units do
    one multiply-add for each value that the wider bus brings.
    """
    batch, demand, need = plan.workload.batch, plan.demand(1), memory_need(plan)
    bandwidth = plan.bandwidth * NEAR_MEMORY_BANDWIDTH_FACTOR
    memory_s = (demand.weight_bytes * batch + demand.kv_bytes) / bandwidth
    changed = replace(pass_time(plan, demand), memory_s=memory_s, compute_s=0.0)
    tokens_per_s = batch / changed.time_s
    return Lever(
        name="near-memory compute",
        change=f"what if: {NEAR_MEMORY_BANDWIDTH_FACTOR:g} × the bandwidth inside the memory, no reuse across a batch",
        metric="decode",
        tokens_per_s=tokens_per_s,
        factor=tokens_per_s / decode_phase(plan).tokens_per_s,
        bound=changed.bound,
        memory_bytes=need.total_bytes,
        fits=need.fits,
        source=NEAR_MEMORY_SOURCE,
    )


def _decode_lever(name: str, change: str, before: Plan, after: Plan, source: str = "by formula") -> Lever:
    decode, need = decode_phase(after), memory_need(after)
    return Lever(
        name=name,
        change=change,
        metric="decode",
        tokens_per_s=decode.tokens_per_s,
        factor=decode.tokens_per_s / decode_phase(before).tokens_per_s,
        bound=decode.pass_time.bound,
        memory_bytes=need.total_bytes,
        fits=need.fits,
        source=source,
    )
