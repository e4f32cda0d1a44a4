"""norm_qkv_rope_store: RMSNorm, then q, k and v by one matrix, turned to their position; k and v into the cache.

Between the product and the cache each row stays in cache. Bit for bit what the unfused ops give.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer, Norm
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.compilation import kernel_address
from numba_engine.backends.cpu.intrinsics import load_f64, load_i32, load_i64, store_f64
from numba_engine.backends.cpu.kernels.head_norm import norm_heads
from numba_engine.backends.cpu.kernels.linear import multiply, segment_table, x_forms
from numba_engine.backends.cpu.kernels.rms_norm import norm, rms_norm_kernel
from numba_engine.backends.cpu.kernels.rope import rotate_heads
from numba_engine.backends.cpu.kernels.store_kv import store_heads
from numba_engine.backends.cpu.thread_team import ARGS, run
from numba_engine.backends.layers import Layer

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

(_COS, _SIN, _K, _V, _H, _KV, _D, _BLOCK_SIZE, _IS_F16, _Q_NORM, _K_NORM, _QKV, _ROW, _POSITIONS, _SLOTS,
 _EPS) = range(16)  # fmt: skip


def supports(
    backend: CpuBackend, qkv: Array, normed: Array, residual: Array, layer: Layer, cache: KVCacheLayer, batch: Batch
) -> bool:
    return layer.attention.rope is not None


def launch(
    backend: CpuBackend, qkv: Array, normed: Array, residual: Array, layer: Layer, cache: KVCacheLayer, batch: Batch
) -> None:
    shape, table = layer.attention, backend.segment_table(layer.qkv_proj)
    assert shape.rope is not None
    backend.call(
        norm_qkv_rope_store, rms_norm_kernel(), rope_store_kernel(),
        table, len(table), layer.attn_norm.weight, layer.attn_norm.eps, layer.qkv_bias,
        _weight(layer.q_norm), _weight(layer.k_norm), shape.rope.cos, shape.rope.sin,
        shape.num_heads, *backend.cache_words(cache), *cache.k.shape[1:], cache.k.dtype.itemsize,
        qkv, normed, residual, *residual.shape, backend.prepared(*residual.shape),
        batch.positions, batch.slot_mapping,
    )  # fmt: skip


def _weight(norm: Norm | None) -> Array | None:
    return None if norm is None else norm.weight


@Command
def norm_qkv_rope_store(
    team: np.ndarray, norm_kernel: int, rope_store: int,
    table: int, num_segments: int, norm_weight: int, eps: float, bias: int,
    q_norm: int, k_norm: int, cos: int, sin: int,
    num_heads: int, k: int, v: int, num_kv_heads: int, block_size: int, d: int, element_bytes: int,
    qkv: int, normed: int, residual: int, num_tokens: int, hidden: int, prepared: int,
    positions: int, slots: int,
) -> None:  # fmt: skip
    segments = segment_table(table, num_segments)
    row = (num_heads + 2 * num_kv_heads) * d
    norm(team, norm_kernel, normed, residual, norm_weight, hidden, num_tokens, eps, x_forms(segments), prepared)
    multiply(team, segments, qkv, row, normed, prepared, hidden, num_tokens, bias, 0)
    team[ARGS + _COS] = cos
    team[ARGS + _SIN] = sin
    team[ARGS + _K] = k
    team[ARGS + _V] = v
    team[ARGS + _H] = num_heads
    team[ARGS + _KV] = num_kv_heads
    team[ARGS + _D] = d
    team[ARGS + _BLOCK_SIZE] = block_size
    team[ARGS + _IS_F16] = element_bytes == 2
    team[ARGS + _Q_NORM] = q_norm
    team[ARGS + _K_NORM] = k_norm
    team[ARGS + _QKV] = qkv
    team[ARGS + _ROW] = row
    team[ARGS + _POSITIONS] = positions
    team[ARGS + _SLOTS] = slots
    store_f64(team.ctypes.data, ARGS + _EPS, eps)
    run(team, rope_store, num_tokens, 1 + 8192 // row)


@functools.cache
def rope_store_kernel() -> int:
    def rope_store_rows(begin: int, end: int, args: int) -> None:
        d, row_size = load_i64(args, _D), load_i64(args, _ROW)
        num_heads, num_kv_heads = load_i64(args, _H), load_i64(args, _KV)
        q_norm = load_i64(args, _Q_NORM)
        eps = np.float32(load_f64(args, _EPS))
        for t in range(begin, end):
            row = load_i64(args, _QKV) + t * row_size * 4
            if q_norm:
                norm_heads(row, q_norm, load_i64(args, _K_NORM), num_heads, num_kv_heads, d, eps)
            position = np.int64(load_i32(load_i64(args, _POSITIONS), t))
            table_offset = position * (d // 2) * 4
            rotate_heads(
                row, load_i64(args, _COS) + table_offset, load_i64(args, _SIN) + table_offset,
                num_heads + num_kv_heads, d,
            )  # fmt: skip
            slot = np.int64(load_i32(load_i64(args, _SLOTS), t))
            store_heads(
                load_i64(args, _K), load_i64(args, _V), row + num_heads * d * 4, slot, num_kv_heads, d,
                load_i64(args, _BLOCK_SIZE), load_i64(args, _IS_F16),
            )  # fmt: skip

    return kernel_address(rope_store_rows, "void(int64, int64, int64)")
