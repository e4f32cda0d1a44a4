"""CudaBackend: the ops of ``Backend`` as launches on a Device, which is a GPU (``cuda``) or the executor (``ptx``)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import numpy as np

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer, Norm, Segment, Weight
from numba_engine.backends.capture import CaptureBackend, Graph, Pending
from numba_engine.backends.cuda import phases
from numba_engine.backends.cuda.arrays import CudaArray
from numba_engine.backends.cuda.device import Device, DeviceArray
from numba_engine.backends.cuda.kernels import sample as sampling_kernels
from numba_engine.backends.cuda.kernels.add import add
from numba_engine.backends.cuda.kernels.advance import AdvancedArrays, advance
from numba_engine.backends.cuda.kernels.attention import MAX_HEAD_DIM, Scratch, Sequences, attention, splits_of
from numba_engine.backends.cuda.kernels.cap_logits import cap_logits
from numba_engine.backends.cuda.kernels.embedding import embedding
from numba_engine.backends.cuda.kernels.gated_activation import gated_activation
from numba_engine.backends.cuda.kernels.gather_rows import gather_rows
from numba_engine.backends.cuda.kernels.head_norm import head_norm
from numba_engine.backends.cuda.kernels.linear import PackedSegment, linear, staging_words
from numba_engine.backends.cuda.kernels.norm_gate_up_act import norm_gate_up_act
from numba_engine.backends.cuda.kernels.norm_linear import norm_linear
from numba_engine.backends.cuda.kernels.norm_qkv_rope_store import Destination, norm_qkv_rope_store
from numba_engine.backends.cuda.kernels.packing import LAYOUTS, looked_up_row_bytes, pack
from numba_engine.backends.cuda.kernels.read_bandwidth import read_bandwidth
from numba_engine.backends.cuda.kernels.rms_norm import rms_norm
from numba_engine.backends.cuda.kernels.rope import rope
from numba_engine.backends.cuda.kernels.sample import SampleScratch, groups_of
from numba_engine.backends.cuda.kernels.store_kv import store_kv
from numba_engine.backends.cuda.weight_order import WeightOrder
from numba_engine.backends.layers import Activation, Attention, GatedMlp, Layer
from numba_engine.backends.sampling import Sampled, Sampling
from numba_engine.config import EngineConfig
from numba_engine.errors import BackendUnavailableError
from numba_engine.formats import F32, StoredTensor

_READ_BYTES = 1 << 30
"""Enough to be larger than any cache; less where it already takes long."""
_READ_LONG_ENOUGH_S = 1e-3


class CudaBackend(CaptureBackend):
    """Runs the unfused ops, one kernel or two each, in order on one stream.

    Activations are float32. Quantised weights are multiplied with two planes of int8, as on the CPU, whatever
    ``activation_dtype`` says: tensor cores take nothing better that is as fast.
    """

    num_threads = 0
    activation_dtype = np.dtype(np.float32)
    quantized_matmul_dtype = "int8"
    kv_cache_share = 0.9  # what is left is for activations, and for what else the driver keeps

    def __init__(self, device: Device, config: EngineConfig, *, name: str) -> None:
        self.name = name
        self.device = device
        self.device_name = device.name
        is_float32 = config.kv_cache_dtype == "float32" or (
            config.kv_cache_dtype == "auto" and config.activation_dtype == "float32"
        )
        self.kv_cache_dtype = np.dtype(np.float32 if is_float32 else np.float16)
        self._fusion = config.fusion
        self._order = WeightOrder()
        self._counts = self.upload(np.zeros((1, 1), np.uint32))
        self._arrivals = self.upload(np.zeros(64 * config.max_num_seqs, np.uint32))

    # ---- memory ------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaArray:
        return CudaArray.owning(self.device, self.device.empty(shape, dtype))

    def upload(self, host: np.ndarray) -> CudaArray:
        return CudaArray.owning(self.device, self.device.upload(np.ascontiguousarray(host)))

    def download(self, array: Array) -> np.ndarray:
        return self.device.download(_on_device(array))

    def write(self, array: Array, host: np.ndarray) -> None:
        self.device.write(_on_device(array), host)

    def download_later(self, array: Array) -> Pending:
        return self.device.download_later(_on_device(array))

    def load_weight(self, name: str, tensors: Sequence[StoredTensor]) -> Weight:
        in_features = tensors[0].shape[1]
        if in_features % 4:
            raise BackendUnavailableError(
                f"{name} has {in_features} columns; backend {self.name} takes multiples of 4. Use backend cpu."
            )
        for tensor in tensors:
            if tensor.format is not F32 and tensor.format not in LAYOUTS:
                raise BackendUnavailableError(
                    f"{tensor.name} is stored as {tensor.format}, which backend {self.name} does not run"
                )
        segments = []
        for format, group in groupby(tensors, key=lambda tensor: tensor.format):
            parts = [np.asarray(tensor.data) for tensor in group]
            data = parts[0] if len(parts) == 1 else np.concatenate(parts)
            packed = CudaArray.owning(self.device, self.device.upload(pack(format, data, in_features), name))
            row_bytes = looked_up_row_bytes(format, in_features)
            segments.append(Segment(format, len(data), packed.nbytes, packed, row_bytes))
        return Weight(name, (sum(segment.num_rows for segment in segments), in_features), tuple(segments))

    def synchronize(self) -> None:
        self.device.synchronize()

    def capture(self) -> AbstractContextManager[Graph]:
        return self.device.capture()

    def free_memory_bytes(self) -> int:
        return self.device.memory_info().free_bytes

    def read_bandwidth_gbps(self) -> float:
        nbytes, taken_s = 1 << 20, 0.0
        while taken_s < _READ_LONG_ENOUGH_S and nbytes < min(_READ_BYTES, self.free_memory_bytes() // 4):
            nbytes *= 4
            taken_s = self._time_to_read(nbytes)
        return nbytes / taken_s / 1e9 if taken_s else 0.0

    def _time_to_read(self, nbytes: int) -> float:
        """The best of three passes, by the host's clock around a synchronised launch."""
        data = self.empty((nbytes // 4,), np.dtype(np.uint32))
        times = []
        for _ in range(4):  # the first one compiles and warms up
            self.device.synchronize()
            start = time.perf_counter()
            read_bandwidth(self.device, data.on_device)
            self.device.synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    # ---- unfused ops ------------------------------------------------------------------------------------------------

    def embedding(self, out: Array, token_ids: Array, table: Weight, scale: float) -> None:
        assert len(table.segments) == 1, "an embedding table is one tensor"
        segment = table.segments[0]
        embedding(self.device, _on_device(out), _on_device(token_ids), segment.data.on_device, segment.format, scale)

    def rms_norm(self, out: Array, x: Array, norm: Norm) -> None:
        rms_norm(self.device, _on_device(out), _on_device(x), _on_device(norm.weight), norm.eps)

    def linear(self, out: Array, x: Array, weight: Weight, bias: Array | None = None) -> None:
        self._linear(out, x, weight, None if bias is None else _on_device(bias), add=False)

    def linear_add(self, residual: Array, x: Array, weight: Weight) -> None:
        self._linear(residual, x, weight, None, add=True)

    def add(self, residual: Array, x: Array, scale: float) -> None:
        add(self.device, _on_device(residual), _on_device(x), scale)

    def _linear(self, out: Array, x: Array, weight: Weight, bias: DeviceArray | None, *, add: bool) -> None:
        segments = _segments(weight)
        num_words = staging_words(segments, *x.shape)
        staging = self.empty((num_words,), np.dtype(np.uint32)) if num_words else None
        on_device = None if staging is None else staging.on_device
        following, arrays = self._order.use(weight), (_on_device(out), _on_device(x))
        linear(self.device, *arrays, segments, bias, add=add, staging=on_device, next_weights=following)

    def rope(self, qkv: Array, positions: Array, shape: Attention) -> None:
        assert shape.rope is not None
        tables = _on_device(shape.rope.cos), _on_device(shape.rope.sin)
        rope(self.device, _on_device(qkv), _on_device(positions), *tables, shape)

    def head_norm(self, qkv: Array, q_norm: Norm, k_norm: Norm, shape: Attention) -> None:
        weights = _on_device(q_norm.weight), _on_device(k_norm.weight)
        head_norm(self.device, _on_device(qkv), *weights, q_norm.eps, shape)

    def store_kv(self, cache: KVCacheLayer, qkv: Array, slot_mapping: Array, shape: Attention) -> None:
        store_kv(
            self.device, _on_device(cache.k), _on_device(cache.v), _on_device(qkv), _on_device(slot_mapping), shape
        )

    def attention(self, out: Array, qkv: Array, cache: KVCacheLayer, batch: Batch, shape: Attention) -> None:
        if shape.head_dim % 8 or shape.head_dim > MAX_HEAD_DIM:
            raise BackendUnavailableError(
                f"head_dim = {shape.head_dim}; backend {self.name} takes multiples of 8 up to {MAX_HEAD_DIM}."
                " Use backend cpu."
            )
        sequences = Sequences(
            _on_device(batch.cu_seqlens_q),
            _on_device(batch.context_lens),
            _on_device(batch.block_tables),
            batch.num_seqs,
            batch.max_query_len,
            batch.max_context_len,
        )
        splits = splits_of(sequences, shape, cache.k.dtype)
        partials = self.empty((splits.num_parts, shape.head_dim), np.dtype(np.float32))
        stats = self.empty((splits.num_parts, 2), np.dtype(np.float32))
        arrivals = self._zero_arrivals(splits.num_counters)
        attention(
            self.device,
            _on_device(out),
            _on_device(qkv),
            _on_device(cache.k),
            _on_device(cache.v),
            sequences,
            Scratch(partials.on_device, stats.on_device, arrivals),
            shape,
        )

    def gated_activation(self, out: Array, gate_up: Array, activation: Activation) -> None:
        gated_activation(self.device, _on_device(out), _on_device(gate_up), activation)

    def gather_rows(self, out: Array, x: Array, rows: Array) -> None:
        gather_rows(self.device, _on_device(out), _on_device(x), _on_device(rows))

    def cap_logits(self, logits: Array, scale: float, softcap: float | None) -> None:
        cap_logits(self.device, _on_device(logits), scale, softcap)

    def sample(self, out: Sampled, logits: Array, sampling: Sampling) -> None:
        token_ids, values, given = _on_device(out.token_ids), _on_device(logits), _sampling_on_device(sampling)
        num_rows, vocab = logits.shape
        totals = self.empty((num_rows,), np.dtype(np.float32))
        raw_history = self.empty(sampling.history.shape, np.dtype(np.float32))
        raw_bias = self.empty(sampling.bias_values.shape, np.dtype(np.float32))
        maxima = self.empty((num_rows, groups_of(vocab)), np.dtype(np.uint64))
        races = self.empty((num_rows, groups_of(vocab)), np.dtype(np.float32))
        scratch = SampleScratch(
            self._zero_counts(sampling, logits),
            raw_history.on_device,
            raw_bias.on_device,
            maxima.on_device,
            races.on_device,
            self._zero_arrivals(num_rows),
        )
        if out.top_token_ids is not None and out.top_logprobs is not None:
            top = _on_device(out.top_token_ids), _on_device(out.top_logprobs)
            sampling_kernels.logprob_totals(self.device, totals.on_device, *top, values)
        if sampling.changes_logits:
            sampling_kernels.penalties(self.device, values, given, scratch)
        sampling_kernels.sample(self.device, token_ids, values, given, scratch)
        if out.logprobs is not None:
            logprobs = _on_device(out.logprobs)
            sampling_kernels.chosen_logprobs(self.device, logprobs, token_ids, values, totals.on_device, given, scratch)

    def advance(self, batch: Batch, sampling: Sampling, token_ids: Array, block_size: int) -> None:
        of_batch = (batch.token_ids, batch.positions, batch.slot_mapping, batch.context_lens)
        of_sampling = (sampling.output_index, sampling.history_ends, sampling.history)
        arrays = AdvancedArrays(*map(_on_device, (*of_batch, *of_sampling)))
        advance(
            self.device,
            arrays,
            _on_device(sampling.history_begins),
            _on_device(token_ids),
            _on_device(batch.block_tables),
            block_size,
        )

    def _zero_arrivals(self, count: int) -> DeviceArray:
        """[≥ count] of zeros, kept: the kernel leaves them zero."""
        if self._arrivals.shape[0] < count:
            self._arrivals = self.upload(np.zeros(count, np.uint32))
        return self._arrivals.on_device

    def _zero_counts(self, sampling: Sampling, logits: Array) -> DeviceArray:
        """[≥ L, vocab] of zeros, kept: the kernel leaves them zero."""
        rows, vocab = logits.shape
        if sampling.changes_logits and (self._counts.shape[0] < rows or self._counts.shape[1] != vocab):
            self._counts = self.upload(np.zeros((rows, vocab), np.uint32))
        return self._counts.on_device

    # ---- fused ops ---------------------------------------------------------------------------------------------------

    def norm_qkv_rope_store(
        self, qkv: Array, normed: Array, residual: Array, layer: Layer, cache: KVCacheLayer, batch: Batch
    ) -> None:
        """The k and v columns of ``qkv`` are undefined after it."""
        segments, num_rows, shape = _segments(layer.qkv_proj), residual.shape[0], layer.attention
        arrays = _on_device(residual), segments, _on_device(layer.attn_norm.weight)
        bias = None if layer.qkv_bias is None else _on_device(layer.qkv_bias)
        if not (self._fusion and phases.fuses_norm(num_rows, segments)):
            super().norm_qkv_rope_store(qkv, normed, residual, layer, cache, batch)
        elif layer.q_norm is None and shape.rope is not None and phases.fuses_rope(num_rows, segments, shape):
            caches = cache.k, cache.v, batch.slot_mapping
            to = Destination(*map(_on_device, (qkv, *caches, batch.positions, shape.rope.cos, shape.rope.sin)))
            following = self._order.use(layer.qkv_proj)
            norm_qkv_rope_store(self.device, to, *arrays, layer.attn_norm.eps, bias, shape, following)
        else:
            following = self._order.use(layer.qkv_proj)
            to_qkv = _on_device(qkv)
            norm_linear(self.device, to_qkv, *arrays, layer.attn_norm.eps, bias=bias, next_weights=following)
            if layer.q_norm is not None and layer.k_norm is not None:
                self.head_norm(qkv, layer.q_norm, layer.k_norm, shape)
            if shape.rope is not None:
                self.rope(qkv, batch.positions, shape)
            self.store_kv(cache, qkv, batch.slot_mapping, shape)

    def norm_gate_up_act(self, mlp_out: Array, gate_up: Array, normed: Array, residual: Array, mlp: GatedMlp) -> None:
        segments, (num_rows, size) = _segments(mlp.gate_up_proj), mlp_out.shape
        arrays = _on_device(residual), segments, _on_device(mlp.norm.weight), mlp.norm.eps
        if not (self._fusion and phases.fuses_norm(num_rows, segments)):
            super().norm_gate_up_act(mlp_out, gate_up, normed, residual, mlp)
        elif phases.fuses_activation(num_rows, segments, size):
            following = self._order.use(mlp.gate_up_proj)
            norm_gate_up_act(self.device, _on_device(mlp_out), *arrays, mlp.activation, following)
        else:
            following = self._order.use(mlp.gate_up_proj)
            norm_linear(self.device, _on_device(gate_up), *arrays, next_weights=following)
            self.gated_activation(mlp_out, gate_up, mlp.activation)

    def norm_lm_head(
        self, logits: Array, last: Array, residual: Array, rows: Array, norm: Norm, lm_head: Weight
    ) -> None:
        segments = _segments(lm_head)
        if not (self._fusion and phases.fuses_norm(logits.shape[0], segments)):
            super().norm_lm_head(logits, last, residual, rows, norm, lm_head)
            return
        arrays = _on_device(logits), _on_device(residual), segments, _on_device(norm.weight)
        norm_linear(self.device, *arrays, norm.eps, rows=_on_device(rows), next_weights=self._order.use(lm_head))


def _on_device(array: Array) -> DeviceArray:
    assert isinstance(array, CudaArray)
    return array.on_device


def _sampling_on_device(sampling: Sampling) -> Sampling:
    """With the device's arrays in it, as kernels take them."""
    names = [part.name for part in fields(sampling) if part.name != "changes_logits"]
    arrays: dict[str, Any] = {name: _on_device(getattr(sampling, name)) for name in names}
    return replace(sampling, **arrays)


def _segments(weight: Weight) -> list[PackedSegment]:
    return [PackedSegment(segment.format, segment.num_rows, segment.data.on_device) for segment in weight.segments]
