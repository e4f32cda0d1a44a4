"""Recorder: a backend that lets another one work and notes what each op took.

Pass it to the forward in the backend's place. An op is only timed while it runs; what it moved and computed is worked
out afterwards, in ``take_step``, from the arguments it was called with, so that looking costs the step little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from numba_engine.backends.base import (
    Array,
    AttentionShape,
    Backend,
    Batch,
    KVCacheLayer,
    LayerWeights,
    RopeTable,
    Sampled,
    SamplingBatch,
    Weight,
)
from numba_engine.profiling.report import OpProfile, ProfileSummary, StepProfile, ops_by_name
from numba_engine.profiling.traffic import FORMULAS, Traffic
from numba_engine.storage import StoredTensor

Clock = Callable[[], float]

_CALIBRATION_CALLS = 2000
_CALIBRATION_ROUNDS = 5


class Recorder(Backend):
    """Delegates every op to ``inner`` with a clock around it.

    A phase that ``inner`` fuses is recorded as one op; one that it leaves to the textbook, or every phase with
    ``fusion=False``, is composed here so that its ops are recorded one by one.

    Op times are the host's clock around the call and the wait for its end: on a GPU each has a
    launch's latency in it.
    ``overhead_s_per_call`` is what one recorded call costs beyond the op itself, measured at construction;
    ``StepProfile.overhead_s`` carries it, and op times do not contain it.
    """

    def __init__(self, inner: Backend, *, fusion: bool = True, clock: Clock = time.perf_counter) -> None:
        self.inner = inner
        self.name = inner.name
        self.device_name = inner.device_name
        self.num_threads = inner.num_threads
        self.activation_dtype = inner.activation_dtype
        self.kv_cache_dtype = inner.kv_cache_dtype
        self.quantized_matmul_dtype = inner.quantized_matmul_dtype
        self.kv_cache_share = inner.kv_cache_share
        self._fused = {
            phase: fusion and getattr(type(inner), phase) is not getattr(Backend, phase)
            for phase in ("norm_qkv_rope_store", "norm_gate_up_silu", "norm_lm_head")
        }
        self._clock = clock
        self._calls: list[tuple[str, tuple[Any, ...], float, float]] = []
        self._inside_s, self.overhead_s_per_call = self._calibrate()

    # ---- the record ------------------------------------------------------------------------------------------------

    def take_step(
        self, *, index: int, num_prefill_tokens: int, num_decode_tokens: int, num_seqs: int, time_s: float
    ) -> StepProfile:
        """What was recorded since the last call, as the profile of one step that took ``time_s`` in all.

        Call it before the arrays of the step's batch are used for the next one.
        """
        profile = StepProfile(
            index=index,
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            num_seqs=num_seqs,
            time_s=time_s,
            ops=self._ops_by_name(),
            overhead_s=self.overhead_s_per_call * len(self._calls),
        )
        self._calls.clear()
        return profile

    def _ops_by_name(self) -> tuple[OpProfile, ...]:
        on_host: dict[int, Batch] = {}
        counts: dict[str, int] = {}
        times: dict[str, float] = {}
        traffic: dict[str, Traffic] = {}
        for name, args, start, end in self._calls:
            host_args = [self._lengths_on_host(arg, on_host) if isinstance(arg, Batch) else arg for arg in args]
            counts[name] = counts.get(name, 0) + 1
            times[name] = times.get(name, 0.0) + max(end - start - self._inside_s, 0.0)
            traffic[name] = traffic.get(name, Traffic()) + FORMULAS[name](*host_args)
        return tuple(op_profile(name, counts[name], times[name], traffic[name]) for name in counts)

    def _lengths_on_host(self, batch: Batch, on_host: dict[int, Batch]) -> Batch:
        if id(batch) not in on_host:
            lengths = self.inner.download(batch.cu_seqlens_q), self.inner.download(batch.context_lens)
            on_host[id(batch)] = replace(batch, cu_seqlens_q=lengths[0], context_lens=lengths[1])
        return on_host[id(batch)]

    def _run(self, name: str, op: Callable[..., Any], *args: Any) -> Any:
        start = self._clock()
        result = op(*args)
        self.inner.synchronize()
        self._calls.append((name, args, start, self._clock()))
        return result

    def _calibrate(self) -> tuple[float, float]:
        """(seconds of a recorded call's interval that are not the op's, seconds it costs in all beyond the op)."""
        none = np.empty(0)

        def op(out: Array, x: Array, weight: Array, eps: float) -> None: ...

        def recorded(out: Array, x: Array, weight: Array, eps: float) -> None:
            self._run("rms_norm", op, out, x, weight, eps)

        def cost(call: Callable[..., None]) -> float:
            start = self._clock()
            for _ in range(_CALIBRATION_CALLS):
                call(none, none, none, 0.0)
            return (self._clock() - start) / _CALIBRATION_CALLS

        bare = min(cost(op) for _ in range(_CALIBRATION_ROUNDS))
        whole = min(cost(recorded) for _ in range(_CALIBRATION_ROUNDS))
        interval = median(end - start for _, _, start, end in self._calls)
        self._calls.clear()
        return max(interval - bare, 0.0), max(whole - bare, 0.0)

    # ---- memory: not recorded --------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self.inner.empty(shape, dtype)

    def upload(self, host: np.ndarray) -> Array:
        return self.inner.upload(host)

    def download(self, array: Array) -> np.ndarray:
        return self.inner.download(array)

    def load_weight(self, name: str, tensors: Sequence[StoredTensor]) -> Weight:
        return self.inner.load_weight(name, tensors)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def free_memory_bytes(self) -> int:
        return self.inner.free_memory_bytes()

    def read_bandwidth_gbps(self) -> float:
        return self.inner.read_bandwidth_gbps()

    # ---- textbook ops ----------------------------------------------------------------------------------------------

    def embedding(self, out: Array, token_ids: Array, table: Weight) -> None:
        self._run("embedding", self.inner.embedding, out, token_ids, table)

    def rms_norm(self, out: Array, x: Array, weight: Array, eps: float) -> None:
        self._run("rms_norm", self.inner.rms_norm, out, x, weight, eps)

    def linear(self, out: Array, x: Array, weight: Weight, bias: Array | None = None) -> None:
        self._run("linear", self.inner.linear, out, x, weight, bias)

    def linear_add(self, residual: Array, x: Array, weight: Weight) -> None:
        self._run("linear_add", self.inner.linear_add, residual, x, weight)

    def rope(self, qkv: Array, positions: Array, table: RopeTable, shape: AttentionShape) -> None:
        self._run("rope", self.inner.rope, qkv, positions, table, shape)

    def head_norm(self, qkv: Array, q_norm: Array, k_norm: Array, shape: AttentionShape) -> None:
        self._run("head_norm", self.inner.head_norm, qkv, q_norm, k_norm, shape)

    def store_kv(self, cache: KVCacheLayer, qkv: Array, slot_mapping: Array, shape: AttentionShape) -> None:
        self._run("store_kv", self.inner.store_kv, cache, qkv, slot_mapping, shape)

    def attention(self, out: Array, qkv: Array, cache: KVCacheLayer, batch: Batch, shape: AttentionShape) -> None:
        self._run("attention", self.inner.attention, out, qkv, cache, batch, shape)

    def silu_and_mul(self, out: Array, gate_up: Array) -> None:
        self._run("silu_and_mul", self.inner.silu_and_mul, out, gate_up)

    def gather_rows(self, out: Array, x: Array, rows: Array) -> None:
        self._run("gather_rows", self.inner.gather_rows, out, x, rows)

    def sample(self, logits: Array, sampling: SamplingBatch) -> Sampled:
        sampled: Sampled = self._run("sample", self.inner.sample, logits, sampling)
        return sampled

    # ---- phases ----------------------------------------------------------------------------------------------------

    def norm_qkv_rope_store(
        self,
        qkv: Array,
        normed: Array,
        residual: Array,
        layer: LayerWeights,
        cache: KVCacheLayer,
        batch: Batch,
        table: RopeTable,
        shape: AttentionShape,
    ) -> None:
        args = (qkv, normed, residual, layer, cache, batch, table, shape)
        if self._fused["norm_qkv_rope_store"]:
            self._run("norm_qkv_rope_store", self.inner.norm_qkv_rope_store, *args)
        else:
            super().norm_qkv_rope_store(*args)

    def norm_gate_up_silu(
        self, mlp_out: Array, gate_up: Array, normed: Array, residual: Array, layer: LayerWeights, eps: float
    ) -> None:
        args = (mlp_out, gate_up, normed, residual, layer, eps)
        if self._fused["norm_gate_up_silu"]:
            self._run("norm_gate_up_silu", self.inner.norm_gate_up_silu, *args)
        else:
            super().norm_gate_up_silu(*args)

    def norm_lm_head(
        self, logits: Array, last: Array, residual: Array, rows: Array, final_norm: Array, lm_head: Weight, eps: float
    ) -> None:
        args = (logits, last, residual, rows, final_norm, lm_head, eps)
        if self._fused["norm_lm_head"]:
            self._run("norm_lm_head", self.inner.norm_lm_head, *args)
        else:
            super().norm_lm_head(*args)


def op_profile(name: str, num_calls: int, time_s: float, traffic: Traffic) -> OpProfile:
    """Measured time and computed traffic of one op, put together."""
    return OpProfile(
        name=name,
        num_calls=num_calls,
        time_s=time_s,
        weight_bytes=traffic.weight_bytes,
        kv_bytes=traffic.kv_read_bytes + traffic.kv_written_bytes,
        activation_bytes=traffic.activation_read_bytes + traffic.activation_written_bytes,
        flops=traffic.flops,
        kv_written_bytes=traffic.kv_written_bytes,
        activation_written_bytes=traffic.activation_written_bytes,
    )


def summarize(steps: Sequence[StepProfile], *, read_bandwidth_gbps: float) -> ProfileSummary:
    """All steps of a profile in one. What there was none of (no prefill step, no decode step) is 0."""
    prefill = [step for step in steps if step.num_prefill_tokens]
    decode = [step for step in steps if step.num_decode_tokens and not step.num_prefill_tokens]
    ops = ops_by_name(decode)
    num_tokens = sum(step.num_decode_tokens for step in decode)
    weight_bytes = sum(op.weight_bytes for op in ops) // num_tokens if decode else 0
    kv_bytes = sum(op.kv_bytes for op in ops) // num_tokens if decode else 0
    tokens_per_s = median(_rate(step.num_decode_tokens, step.net_time_s) for step in decode) if decode else 0.0
    floor_s = (weight_bytes + kv_bytes) / (read_bandwidth_gbps * 1e9) if read_bandwidth_gbps else 0.0
    return ProfileSummary(
        num_prefill_steps=len(prefill),
        num_decode_steps=len(decode),
        prefill_tokens_per_s=_rate(
            sum(step.num_prefill_tokens for step in prefill), sum(step.net_time_s for step in prefill)
        ),
        decode_tokens_per_s=tokens_per_s,
        read_bandwidth_gbps=read_bandwidth_gbps,
        bytes_per_token=weight_bytes + kv_bytes,
        floor_s=floor_s,
        share_of_floor=tokens_per_s * floor_s,
        ops=ops,
        shares=_shares(decode, ops),
        weight_bytes_per_token=weight_bytes,
        kv_bytes_per_token=kv_bytes,
        overhead_s_per_step=sum(step.overhead_s for step in decode) / len(decode) if decode else 0.0,
    )


def _shares(steps: Sequence[StepProfile], ops: Sequence[OpProfile]) -> tuple[tuple[str, float], ...]:
    times = [(op.name, op.time_s) for op in ops] + [("host", sum(step.host_time_s for step in steps))]
    total = sum(time_s for _, time_s in times)
    shares = [(name, time_s / total) for name, time_s in times] if total else []
    return tuple(sorted(shares, key=lambda share: -share[1]))


def _rate(count: int, time_s: float) -> float:
    return count / time_s if time_s else 0.0
