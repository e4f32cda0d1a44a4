"""CpuBackend: the ops on NumPy arrays, by compiled kernels on a team of threads."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import psutil

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer, Norm, Weight
from numba_engine.backends.base import Backend
from numba_engine.backends.cpu.intrinsics import LANES, InstructionSet, host_instruction_set
from numba_engine.backends.cpu.kernels.arithmetic_peak import (
    BUFFER_BYTES,
    MULTIPLY_ADDS,
    arithmetic_peak,
    arithmetic_peak_kernel,
)
from numba_engine.backends.cpu.kernels.attention import attention, attention_kernels
from numba_engine.backends.cpu.kernels.embedding import embedding, embedding_kernel
from numba_engine.backends.cpu.kernels.gated_activation import gated_activation, gated_activation_kernel
from numba_engine.backends.cpu.kernels.gather_rows import gather_rows
from numba_engine.backends.cpu.kernels.head_norm import head_norm, head_norm_kernel
from numba_engine.backends.cpu.kernels.linear import linear
from numba_engine.backends.cpu.kernels.phases import (
    gate_up_act_kernel,
    layer_constants,
    norm_gate_up_act,
    norm_lm_head,
    norm_qkv_rope_store,
    rope_store_kernel,
)
from numba_engine.backends.cpu.kernels.quantize_rows import BF16, F32, INT8, prepare_rows_kernel, prepared_bytes
from numba_engine.backends.cpu.kernels.read_bandwidth import read_bandwidth, read_bandwidth_kernel
from numba_engine.backends.cpu.kernels.rms_norm import rms_norm, rms_norm_kernel
from numba_engine.backends.cpu.kernels.rope import rope, rope_kernel
from numba_engine.backends.cpu.kernels.sample import sample, sample_kernel
from numba_engine.backends.cpu.kernels.store_kv import store_kv, store_kv_kernel
from numba_engine.backends.cpu.thread_team import ThreadTeam, usable_cores
from numba_engine.backends.cpu.weights import CpuWeight, WeightMemory, allocate, load_weight, x_form
from numba_engine.backends.layers import Activation, Attention, GatedMlp, Layer
from numba_engine.backends.sampling import Sampled, SamplingBatch
from numba_engine.config import EngineConfig
from numba_engine.formats import Format, StoredTensor

_BANDWIDTH_BYTES = 1 << 28
_NONE = np.empty(0, dtype=np.float32)
_NO_IDS = np.empty((0, 0), dtype=np.int32)
_NO_VALUES = np.empty((0, 0), dtype=np.float32)


class CpuBackend(Backend):
    """One engine's CPU. Not thread-safe: one thread calls it at a time; several of them may live in one process."""

    name = "cpu"
    kv_cache_share = 0.25  # the rest of the machine wants memory too

    def __init__(self, config: EngineConfig, *, isa: InstructionSet | None = None) -> None:
        """``isa`` overrides the choice of instruction set; every one gives the same numbers."""
        self._isa = isa or host_instruction_set()
        self.num_threads = config.num_threads or usable_cores()
        self.quantized_matmul_dtype = config.activation_dtype
        self._int8 = config.activation_dtype == "int8"
        self._fusion = config.fusion
        self.activation_dtype = np.dtype(np.float32)
        kv_dtype = config.kv_cache_dtype
        if kv_dtype == "auto":
            kv_dtype = "float16" if self._int8 else "float32"
        self.kv_cache_dtype = np.dtype(kv_dtype)
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        self.device_name = f"{_cpu_model()}, {threads}, {self._isa}"
        self._team = ThreadTeam(self.num_threads)
        self._weight_memory = WeightMemory()
        self._scratch = np.empty(0, dtype=np.uint8)  # quantised activations
        self._scratch_address = 0
        self._constants: dict[Layer, tuple[KVCacheLayer, np.ndarray]] = {}
        self._cache_words: dict[KVCacheLayer, tuple[np.ndarray, np.ndarray]] = {}
        self._partials = np.empty(1 << 18, dtype=np.float32)
        self._counts = np.empty((0, 0), dtype=np.int32)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)

    def upload(self, host: np.ndarray) -> Array:
        return np.array(host, order="C")

    def download(self, array: Array) -> np.ndarray:
        return np.array(array)

    def load_weight(self, name: str, tensors: Sequence[StoredTensor]) -> Weight:
        return load_weight(
            name, tensors, self._weight_memory, int8_activations=self._int8, isa=self._isa, num_threads=self.num_threads
        )

    def synchronize(self) -> None:
        """Ops are done when they return."""

    def free_memory_bytes(self) -> int:
        available = int(psutil.virtual_memory().available)
        limit = _container_memory_left()
        return available if limit is None else max(0, min(available, limit))

    def read_bandwidth_gbps(self) -> float:
        """Best of the passes over 256 MiB that fit into 0.3 s: others' use of the memory only ever lowers it."""
        buffer = allocate(_BANDWIDTH_BYTES)
        buffer[:] = 1  # else all pages would be one page of zeros, in cache
        read_bandwidth(self._team.state, read_bandwidth_kernel(), buffer)
        best = 0.0
        end = time.perf_counter() + 0.3
        while (start := time.perf_counter()) < end:
            read_bandwidth(self._team.state, read_bandwidth_kernel(), buffer)
            best = max(best, buffer.nbytes / (time.perf_counter() - start) / 1e9)
        return best

    def peak_gflops(self, format: Format) -> tuple[float, str]:
        """Best of the passes that fit into 0.2 s. In two planes of int8, two of bytes make one of the model's."""
        buffer = allocate(BUFFER_BYTES)
        buffer[:] = 1
        form = x_form(format) if self._int8 else F32
        kernel = arithmetic_peak_kernel(form, self._isa)
        pieces = 256 * self.num_threads
        flops = 2 * pieces * MULTIPLY_ADDS[form] / (2 if form == INT8 else 1)
        arithmetic_peak(self._team.state, kernel, buffer, pieces)
        best = 0.0
        end = time.perf_counter() + 0.2
        while (start := time.perf_counter()) < end:
            arithmetic_peak(self._team.state, kernel, buffer, pieces)
            best = max(best, flops / (time.perf_counter() - start) / 1e9)
        names = {INT8: "int8 dot products, two planes", BF16: "bf16 dot products", F32: "float32 fma"}
        return best, f"{names[form]} ({self._isa})"

    # ---- unfused ops ----------------------------------------------------------------------------------------------

    def embedding(self, out: Array, token_ids: Array, table: Weight) -> None:
        weight = _own(table)
        kernels = np.array([embedding_kernel(s.format) for s in weight.segments], dtype=np.int64)
        embedding(self._team.state, weight.table, kernels, out, token_ids)

    def rms_norm(self, out: Array, x: Array, norm: Norm) -> None:
        rms_norm(self._team.state, rms_norm_kernel(), out, x, norm.weight, norm.eps)

    def linear(self, out: Array, x: Array, weight: Weight, bias: Array | None = None) -> None:
        address = 0 if bias is None else cast(np.ndarray, bias).ctypes.data
        self._linear(out, x, _own(weight), address, 0)

    def linear_add(self, residual: Array, x: Array, weight: Weight) -> None:
        self._linear(residual, x, _own(weight), 0, 1)

    def _linear(self, out: Array, x: Array, weight: CpuWeight, bias: int, add: int) -> None:
        rows, in_features = x.shape
        linear(
            self._team.state, weight.table, out, x, bias, add, prepare_rows_kernel(), self._prepared(rows, in_features)
        )

    def _prepared(self, rows: int, in_features: int) -> int:
        """Address of memory that holds x [rows, in_features] in the forms that weights take."""
        wanted = prepared_bytes(rows, in_features)
        if self._scratch.size < wanted:
            self._scratch = np.empty(wanted + 63, dtype=np.uint8)
            self._scratch_address = -(-self._scratch.ctypes.data // 64) * 64
        return self._scratch_address

    def rope(self, qkv: Array, positions: Array, shape: Attention) -> None:
        assert shape.rope is not None
        heads = shape.num_heads + shape.num_kv_heads
        rope(self._team.state, rope_kernel(), qkv, positions, shape.rope.cos, shape.rope.sin, heads)

    def head_norm(self, qkv: Array, q_norm: Norm, k_norm: Norm, shape: Attention) -> None:
        head_norm(
            self._team.state, head_norm_kernel(), qkv, q_norm.weight, k_norm.weight, shape.num_heads,
            shape.num_kv_heads, q_norm.eps,
        )  # fmt: skip

    def store_kv(self, cache: KVCacheLayer, qkv: Array, slot_mapping: Array, shape: Attention) -> None:
        store_kv(self._team.state, store_kv_kernel(), _words(cache.k), _words(cache.v), qkv, slot_mapping)

    def attention(self, out: Array, qkv: Array, cache: KVCacheLayer, batch: Batch, shape: Attention) -> None:
        whole, split, merge, prompt = attention_kernels(
            shape.head_dim, shape.num_heads // shape.num_kv_heads, self.kv_cache_dtype.itemsize == 2
        )
        words = self._cache_words.get(cache)
        if words is None:
            words = self._cache_words[cache] = _words(cache.k), _words(cache.v)
        attention(
            self._team.state, whole, split, merge, prompt, out, qkv, words[0], words[1], batch.cu_seqlens_q,
            batch.context_lens,
            batch.block_tables, batch.max_context_len, shape.window or 0, shape.scale, self._partials,
        )  # fmt: skip

    def gated_activation(self, out: Array, gate_up: Array, activation: Activation) -> None:
        gated_activation(self._team.state, gated_activation_kernel(), out, gate_up)

    def gather_rows(self, out: Array, x: Array, rows: Array) -> None:
        gather_rows(out, x, rows)

    def sample(self, logits: Array, sampling: SamplingBatch) -> Sampled:
        num_logits, vocab = sampling.num_logits, logits.shape[1]
        num_top = sampling.num_top_logprobs
        if cast(Any, sampling.history).size and self._counts.size < num_logits * vocab:
            self._counts = np.zeros((num_logits, vocab), dtype=np.int32)
        token_ids = np.empty(num_logits, dtype=np.int32)
        logprobs = np.empty(num_logits, dtype=np.float32) if num_top >= 0 else _NONE
        top_ids = np.empty((num_logits, num_top), dtype=np.int32) if num_top >= 0 else _NO_IDS
        top_logprobs = np.empty((num_logits, num_top), dtype=np.float32) if num_top >= 0 else _NO_VALUES
        s = sampling
        sample(
            self._team.state, sample_kernel(), logits, s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty,
            s.presence_penalty, s.frequency_penalty, s.seed, s.output_index, s.history_offsets, s.history,
            s.history_prompt_lens, s.bias_offsets, s.bias_token_ids, s.bias_values, num_top, self._counts, token_ids,
            logprobs, top_ids, top_logprobs,
        )  # fmt: skip
        if num_top < 0:
            return Sampled(token_ids, None, None, None)
        return Sampled(token_ids, logprobs, top_ids, top_logprobs)

    # ---- fused ops -------------------------------------------------------------------------------------------------

    def norm_qkv_rope_store(
        self, qkv: Array, normed: Array, residual: Array, layer: Layer, cache: KVCacheLayer, batch: Batch
    ) -> None:
        if not self._fusion or layer.attention.rope is None:
            super().norm_qkv_rope_store(qkv, normed, residual, layer, cache, batch)
            return
        known = self._constants.get(layer)
        if known is None or known[0] is not cache:
            known = self._constants[layer] = cache, layer_constants(layer, cache)
        norm_qkv_rope_store(
            self._team.state, rms_norm_kernel(), rope_store_kernel(), _own(layer.qkv_proj).table, known[1], qkv, normed,
            residual, layer.attn_norm.eps, batch.positions, batch.slot_mapping, self._prepared(*residual.shape),
        )  # fmt: skip

    def norm_gate_up_act(self, mlp_out: Array, gate_up: Array, normed: Array, residual: Array, mlp: GatedMlp) -> None:
        weight = _own(mlp.gate_up_proj)
        intermediate = mlp_out.shape[1]
        is_in_halves = weight.segment_rows in ((2 * intermediate,), (intermediate, intermediate))
        if not (self._fusion and intermediate % LANES == 0 and is_in_halves):
            super().norm_gate_up_act(mlp_out, gate_up, normed, residual, mlp)
            return
        norm_gate_up_act(
            self._team.state, rms_norm_kernel(), gate_up_act_kernel(), weight.table, mlp_out, gate_up, normed,
            residual, mlp.norm.weight, mlp.norm.eps, self._prepared(*residual.shape),
        )  # fmt: skip

    def norm_lm_head(
        self, logits: Array, last: Array, residual: Array, rows: Array, norm: Norm, lm_head: Weight
    ) -> None:
        if not self._fusion:
            super().norm_lm_head(logits, last, residual, rows, norm, lm_head)
            return
        norm_lm_head(
            self._team.state, rms_norm_kernel(), prepare_rows_kernel(), _own(lm_head).table, logits, last, residual,
            rows, norm.weight, norm.eps, self._prepared(*last.shape),
        )  # fmt: skip


def _own(weight: Weight) -> CpuWeight:
    assert isinstance(weight, CpuWeight)
    return weight


def _words(cache: Array) -> np.ndarray:
    """The cache as numba accepts it: it knows no float16 arrays on CPUs, and the kernels only want the address."""
    array = cast(np.ndarray, cache)
    return array.view(np.uint16) if array.itemsize == 2 else array


def _container_memory_left() -> int | None:
    """Bytes the control group still allows, None if it sets no limit."""
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            return int(limit.read()) - int(current.read())  # no limit reads "max"
    except (OSError, ValueError):
        return None


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
