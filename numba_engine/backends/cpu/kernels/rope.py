"""rope: rotate the q and k heads of qkv [T, (H + 2 KV) D] in place to their positions (Su et al. 2021).

Dimension i of a head pairs with i + D/2 (the Hugging Face order): (a, b) → (a cos - b sin, b cos + a sin).
cos, sin: [max_model_len, D/2] float32. Bytes moved: q and k once in and out, in cache.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.compilation import inner, kernel_address
from numba_engine.backends.cpu.intrinsics import load_f32, load_i32, load_i64, store_f32
from numba_engine.backends.cpu.thread_team import ARGS, run
from numba_engine.backends.layers import Attention

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

_QKV, _ROW, _POSITIONS, _COS, _SIN, _HEADS, _D = range(7)


def launch(backend: CpuBackend, qkv: Array, positions: Array, shape: Attention) -> None:
    assert shape.rope is not None
    heads = shape.num_heads + shape.num_kv_heads
    tables = shape.rope.cos, shape.rope.sin
    backend.call(rope, rope_kernel(), qkv, *qkv.shape, positions, *tables, heads, shape.head_dim)


@Command
def rope(
    team: np.ndarray, kernel: int, qkv: int, num_tokens: int, row: int, positions: int, cos: int, sin: int,
    num_rotated_heads: int, d: int,
) -> None:  # fmt: skip
    team[ARGS + _QKV] = qkv
    team[ARGS + _ROW] = row
    team[ARGS + _POSITIONS] = positions
    team[ARGS + _COS] = cos
    team[ARGS + _SIN] = sin
    team[ARGS + _HEADS] = num_rotated_heads
    team[ARGS + _D] = d
    run(team, kernel, num_tokens, 1 + 8192 // row)


@functools.cache
def rope_kernel() -> int:
    def rope_rows(begin: int, end: int, args: int) -> None:
        d = load_i64(args, _D)
        for t in range(begin, end):
            row = load_i64(args, _QKV) + t * load_i64(args, _ROW) * 4
            position = np.int64(load_i32(load_i64(args, _POSITIONS), t))
            table_offset = position * (d // 2) * 4
            rotate_heads(
                row, load_i64(args, _COS) + table_offset, load_i64(args, _SIN) + table_offset, load_i64(args, _HEADS), d
            )

    return kernel_address(rope_rows, "void(int64, int64, int64)")


@inner
def rotate_heads(heads: int, cos: int, sin: int, num_heads: int, d: int) -> None:
    half = d // 2
    for head in range(num_heads):
        first = heads + head * d * 4
        second = first + half * 4
        for i in range(half):
            a, b = load_f32(first, i), load_f32(second, i)
            c, s = load_f32(cos, i), load_f32(sin, i)
            store_f32(first, i, a * c - b * s)
            store_f32(second, i, b * c + a * s)
