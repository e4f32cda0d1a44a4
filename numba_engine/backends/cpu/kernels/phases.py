"""The fused phases: the textbook ops of ``Backend`` with what lies between them kept in cache, one launch each.

Each gives bit for bit what the ops one by one give.
"""

from __future__ import annotations

import functools
from typing import cast

import numpy as np

from numba_engine.backends.arrays import Array, KVCacheLayer, Norm
from numba_engine.backends.cpu.compilation import inner, kernel_address, launcher
from numba_engine.backends.cpu.intrinsics import (
    LANES,
    call_kernel,
    load_f64,
    load_i32,
    load_i64,
    stack_bytes,
    store_f64,
    store_i64,
)
from numba_engine.backends.cpu.kernels.gated_activation import activate_row
from numba_engine.backends.cpu.kernels.head_norm import norm_heads
from numba_engine.backends.cpu.kernels.linear import (
    KERNEL,
    LINEAR_OUT,
    LINEAR_OUT_STRIDE,
    MOST_BLOCK_ROWS,
    NEXT,
    NEXT_BYTES,
    NUM_LINEAR_ARGS,
    PROMPT_ROWS,
    cut_alike,
    cut_rows,
    min_piece,
    multiply,
    num_items,
    prompt_tile,
    write_linear_args,
    x_forms,
)
from numba_engine.backends.cpu.kernels.quantize_rows import prepare
from numba_engine.backends.cpu.kernels.rms_norm import norm
from numba_engine.backends.cpu.kernels.rope import rotate_heads
from numba_engine.backends.cpu.kernels.store_kv import store_heads
from numba_engine.backends.cpu.thread_team import ARGS, announce, run
from numba_engine.backends.layers import Layer

# Arguments of rope_store. The first are the same for a layer in every step: what ``layer_constants`` gives.
(_COS, _SIN, _K, _V, _H, _KV, _D, _BLOCK_SIZE, _IS_F16, _Q_NORM, _K_NORM, _NORM_WEIGHT, _BIAS, _QKV, _ROW, _POSITIONS,
 _SLOTS, _EPS) = range(18)  # fmt: skip
_NUM_CONSTANTS = _QKV
# Arguments of gate_up_act, behind two blocks of linear's arguments.
_GATE_ARGS, _UP_ARGS = 0, NUM_LINEAR_ARGS
_GATE_KERNEL, _UP_KERNEL, _OUT, _GATE_UP, _I, _R = range(32, 38)
_TILE_STRIDE = 2 * LANES * 4
_TILE_BYTES = MOST_BLOCK_ROWS * _TILE_STRIDE


def layer_constants(layer: Layer, cache: KVCacheLayer) -> np.ndarray:
    """Addresses and sizes for ``norm_qkv_rope_store``, which hold as long as the arguments live.

    Arrays cost a call from Python about 0.1 µs each, which is a tenth of this phase in a small model.
    """
    constants = np.zeros(_NUM_CONSTANTS, dtype=np.int64)
    table = layer.attention.rope
    assert table is not None
    constants[_COS], constants[_SIN] = _address(table.cos), _address(table.sin)
    constants[_K], constants[_V] = _address(cache.k), _address(cache.v)
    constants[_H] = layer.attention.num_heads
    constants[[_KV, _BLOCK_SIZE, _D]] = cache.k.shape[1:]
    constants[_IS_F16] = cast(np.ndarray, cache.k).itemsize == 2
    constants[_Q_NORM], constants[_K_NORM] = _norm_address(layer.q_norm), _norm_address(layer.k_norm)
    constants[_NORM_WEIGHT], constants[_BIAS] = _norm_address(layer.attn_norm), _address(layer.qkv_bias)
    return constants


def _address(array: Array | None) -> int:
    """0 for None."""
    return 0 if array is None else cast(np.ndarray, array).ctypes.data


def _norm_address(norm: Norm | None) -> int:
    return 0 if norm is None else _address(norm.weight)


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


@launcher
def norm_gate_up_act(
    team: np.ndarray, norm_kernel: int, gate_up_act: int, table: np.ndarray, out: np.ndarray, gate_up: np.ndarray,
    normed: np.ndarray, residual: np.ndarray, norm_weight: np.ndarray, eps: float, prepared: int,
) -> None:  # fmt: skip
    """The intermediate size is a multiple of 16, and gate and up are one segment or one each."""
    r, hidden = residual.shape
    intermediate = out.shape[1]
    norm(
        team, norm_kernel, normed.ctypes.data, residual.ctypes.data, norm_weight.ctypes.data, hidden, r, eps,
        x_forms(table), prepared,
    )  # fmt: skip
    up = table.shape[0] - 1
    for segment, at in ((0, _GATE_ARGS), (up, _UP_ARGS)):
        write_linear_args(
            team, at, table, segment, normed.ctypes.data, prepared, hidden, r, gate_up.ctypes.data, 8 * intermediate,
            0, 0,
        )  # fmt: skip
    args = team.ctypes.data + 8 * ARGS
    if up == 0:
        cut_rows(args + 8 * _GATE_ARGS, 0, intermediate)
        cut_rows(args + 8 * _UP_ARGS, intermediate, intermediate)
    cut_alike(args + 8 * _GATE_ARGS, args + 8 * _UP_ARGS)
    team[ARGS + _GATE_KERNEL] = table[0, KERNEL]
    team[ARGS + _UP_KERNEL] = table[up, KERNEL]
    team[ARGS + _OUT] = out.ctypes.data
    team[ARGS + _GATE_UP] = gate_up.ctypes.data
    team[ARGS + _I] = intermediate
    team[ARGS + _R] = r
    announce(team, table[0, NEXT], table[0, NEXT_BYTES])
    run(team, gate_up_act, num_items(intermediate, r, args), (min_piece(table, 0, r) + 1) // 2)


@functools.cache
def gate_up_act_kernel() -> int:
    args_place, tiles_place = stack_bytes(2 * 8 * NUM_LINEAR_ARGS), stack_bytes(2 * _TILE_BYTES)

    def gate_up_act_items(begin: int, end: int, args: int) -> None:
        r, intermediate = load_i64(args, _R), load_i64(args, _I)
        gate_args, up_args = args + 8 * _GATE_ARGS, args + 8 * _UP_ARGS
        gate_kernel, up_kernel = load_i64(args, _GATE_KERNEL), load_i64(args, _UP_KERNEL)
        out = load_i64(args, _OUT)
        if r < PROMPT_ROWS:
            call_kernel(gate_kernel, begin, end, gate_args)
            call_kernel(up_kernel, begin, end, up_args)
            first, columns = begin * LANES, (end - begin) * LANES
            for row in range(r):
                gate = load_i64(args, _GATE_UP) + (row * 2 * intermediate + first) * 4
                activate_row(out + (row * intermediate + first) * 4, gate, gate + intermediate * 4, columns)
            return
        own_args, tiles = args_place(0), tiles_place(0)
        own_gate_args, own_up_args = own_args, own_args + 8 * NUM_LINEAR_ARGS
        for item in range(begin, end):
            first, last, t, count = prompt_tile(gate_args, item)
            into_tile(own_gate_args, gate_args, tiles, first, t)
            into_tile(own_up_args, up_args, tiles + _TILE_BYTES, first, t)
            call_kernel(gate_kernel, item, item + 1, own_gate_args)
            call_kernel(up_kernel, item, item + 1, own_up_args)
            for row in range(count):
                gate = tiles + row * _TILE_STRIDE
                to = out + ((t + row) * intermediate + first * LANES) * 4
                activate_row(to, gate, gate + _TILE_BYTES, (last - first) * LANES)

    return kernel_address(gate_up_act_items, "void(int64, int64, int64)")


@inner
def into_tile(to: int, args: int, tile: int, group: int, t: int) -> None:
    """Arguments that make the job write what begins at (group, t) to ``tile``, rows _TILE_STRIDE apart.

    Rows of gate and up would else lie a multiple of 4096 bytes apart in many models, which caches keep few of.
    """
    for i in range(NUM_LINEAR_ARGS):
        store_i64(to, i, load_i64(args, i))
    store_i64(to, LINEAR_OUT, tile - group * LANES * 4 - t * _TILE_STRIDE)
    store_i64(to, LINEAR_OUT_STRIDE, _TILE_STRIDE)


@launcher
def norm_lm_head(
    team: np.ndarray, norm_kernel: int, prepare_rows: int, table: np.ndarray, logits: np.ndarray, last: np.ndarray,
    residual: np.ndarray, rows: np.ndarray, norm_weight: np.ndarray, eps: float, prepared: int,
) -> None:  # fmt: skip
    hidden = residual.shape[1]
    for i in range(rows.size):
        norm(
            team, norm_kernel, last.ctypes.data + i * hidden * 4, residual.ctypes.data + rows[i] * hidden * 4,
            norm_weight.ctypes.data, hidden, 1, eps, 0, 0,
        )  # fmt: skip
    prepare(team, prepare_rows, x_forms(table), prepared, last.ctypes.data, hidden, rows.size)
    multiply(team, table, logits.ctypes.data, logits.shape[1], last.ctypes.data, prepared, hidden, rows.size, 0, 0)
