"""norm_qkv_rope_store: RMSNorm, then q, k and v by one matrix, turned to their position; k and v into the cache.

Between the product and the cache each row stays in cache. Bit for bit what the unfused ops give.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

import numpy as np

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer, Norm
from numba_engine.backends.cpu.addresses import address
from numba_engine.backends.cpu.compilation import kernel_address, launcher
from numba_engine.backends.cpu.intrinsics import load_f64, load_i32, load_i64, store_f64
from numba_engine.backends.cpu.kernels.head_norm import norm_heads
from numba_engine.backends.cpu.kernels.linear import multiply, x_forms
from numba_engine.backends.cpu.kernels.rms_norm import norm, rms_norm_kernel
from numba_engine.backends.cpu.kernels.rope import rotate_heads
from numba_engine.backends.cpu.kernels.store_kv import store_heads
from numba_engine.backends.cpu.thread_team import ARGS, run
from numba_engine.backends.layers import Layer

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

# Arguments of rope_store. The first are the same for a layer in every step: what ``layer_constants`` gives.
(_COS, _SIN, _K, _V, _H, _KV, _D, _BLOCK_SIZE, _IS_F16, _Q_NORM, _K_NORM, _NORM_WEIGHT, _BIAS, _QKV, _ROW, _POSITIONS,
 _SLOTS, _EPS) = range(18)  # fmt: skip
_NUM_CONSTANTS = _QKV


def supports(
    backend: CpuBackend, qkv: Array, normed: Array, residual: Array, layer: Layer, cache: KVCacheLayer, batch: Batch
) -> bool:
    return layer.attention.rope is not None


def launch(
    backend: CpuBackend, qkv: Array, normed: Array, residual: Array, layer: Layer, cache: KVCacheLayer, batch: Batch
) -> None:
    norm_qkv_rope_store(
        backend.team, rms_norm_kernel(), rope_store_kernel(), backend.segment_table(layer.qkv_proj),
        backend.kept((layer, cache), layer_constants), qkv, normed, residual, layer.attn_norm.eps, batch.positions,
        batch.slot_mapping, backend.prepared(*residual.shape),
    )  # fmt: skip


def layer_constants(layer: Layer, cache: KVCacheLayer) -> np.ndarray:
    """Addresses and sizes for ``norm_qkv_rope_store``, which hold as long as the arguments live.

    Arrays cost a call from Python about 0.1 µs each, which is a tenth of this phase in a small model.
    """
    constants = np.zeros(_NUM_CONSTANTS, dtype=np.int64)
    table = layer.attention.rope
    assert table is not None
    constants[_COS], constants[_SIN] = address(table.cos), address(table.sin)
    constants[_K], constants[_V] = address(cache.k), address(cache.v)
    constants[_H] = layer.attention.num_heads
    constants[[_KV, _BLOCK_SIZE, _D]] = cache.k.shape[1:]
    constants[_IS_F16] = cast(np.ndarray, cache.k).itemsize == 2
    constants[_Q_NORM], constants[_K_NORM] = _weight_address(layer.q_norm), _weight_address(layer.k_norm)
    constants[_NORM_WEIGHT], constants[_BIAS] = _weight_address(layer.attn_norm), address(layer.qkv_bias)
    return constants


def _weight_address(norm: Norm | None) -> int:
    return 0 if norm is None else address(norm.weight)


@launcher
def norm_qkv_rope_store(
    team: np.ndarray, norm_kernel: int, rope_store: int, table: np.ndarray, constants: np.ndarray, qkv: np.ndarray,
    normed: np.ndarray, residual: np.ndarray, eps: float, positions: np.ndarray, slot_mapping: np.ndarray,
    prepared: int,
) -> None:  # fmt: skip
    r, hidden = residual.shape
    norm(
        team, norm_kernel, normed.ctypes.data, residual.ctypes.data, constants[_NORM_WEIGHT], hidden, r, eps,
        x_forms(table), prepared,
    )  # fmt: skip
    multiply(team, table, qkv.ctypes.data, qkv.shape[1], normed.ctypes.data, prepared, hidden, r, constants[_BIAS], 0)
    for i in range(_NUM_CONSTANTS):
        team[ARGS + i] = constants[i]
    team[ARGS + _QKV] = qkv.ctypes.data
    team[ARGS + _ROW] = qkv.shape[1]
    team[ARGS + _POSITIONS] = positions.ctypes.data
    team[ARGS + _SLOTS] = slot_mapping.ctypes.data
    store_f64(team.ctypes.data, ARGS + _EPS, eps)
    run(team, rope_store, r, 1 + 8192 // qkv.shape[1])


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
