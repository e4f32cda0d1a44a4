"""quantize_rows: activations to integers per 32 values, once for all rows of a weight.

    d = max|x| / 32512;   q = round_to_even(x / d) = 256 high + low;   and the sums that zero points and minima need

q is kept as two planes of int8, so that int8 dot instructions make exact 16-bit products of it. One plane alone (what
ggml does, Q8_1) moved the log-probabilities of SmolLM2 by 0.15 in the mean, two move them by 0.0015; decoding waits for
memory either way, prompts take 1.8 times as long as with one.

x [R, N] float32 → [R] rows of ``x_int8_stride(N)`` bytes: high int8 [N], low int8 [N], d f32 [N/32],
sum(q) i32 [N/32], d * sum(q) f32 [N/32]. N is a multiple of 32.
A NaN makes its block's d NaN. Bytes moved: 4 N + 2.4 N a row, in cache.
"""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import types

from numba_engine.backends.cpu.compilation import inner, kernel_address
from numba_engine.backends.cpu.intrinsics import LANES, Emitter, emit, f32, i8, load_i64, vf32, vi32
from numba_engine.backends.cpu.thread_team import ARGS, run

_X_INT8, _X, _N = 0, 1, 2
LARGEST = 127.0 * 256
MOST_INVERSE = 3e38  # blocks smaller than this can scale are taken as zero


def int8_bytes(num_rows: int, in_features: int) -> int:
    """Bytes of the quantised x, with room for reading a vector past its end."""
    return num_rows * int(x_int8_stride.py_func(in_features)) + 64


@inner
def x_int8_stride(in_features: int) -> int:
    """Bytes of a row of int8 activations, 64-aligned."""
    return (in_features // 32 * (64 + 12) + 63) // 64 * 64


@inner
def quantize(team: np.ndarray, kernel: int, x_int8: int, x: int, in_features: int, num_rows: int) -> None:
    team[ARGS + _X_INT8] = x_int8
    team[ARGS + _X] = x
    team[ARGS + _N] = in_features
    run(team, kernel, num_rows, 1 + 16384 // in_features)


@functools.cache
def quantize_rows_kernel() -> int:
    def quantize_rows(begin: int, end: int, args: int) -> None:
        n = load_i64(args, _N)
        for row in range(begin, end):
            quantize_row(load_i64(args, _X_INT8) + row * x_int8_stride(n), load_i64(args, _X) + row * n * 4, n)

    return kernel_address(quantize_rows, "void(int64, int64, int64)")


def _quantize_row(b: ir.IRBuilder, out: ir.Value, x: ir.Value, n: ir.Value) -> None:
    e = Emitter(b)
    blocks = b.lshr(n, e.integer(5))
    low_plane = e.at(out, n)
    scales = e.at(low_plane, n)
    sums = e.at(scales, blocks, 4)
    scaled_sums = e.at(sums, blocks, 4)
    bytes16 = ir.VectorType(i8, LANES)
    with e.loop(blocks) as block:
        halves = [e.load(e.at(e.at(x, block, 128), 64 * i), vf32, 4) for i in range(2)]
        largest = e.reduce(
            e.binary("maximum", *(e.unary("fabs", half) for half in halves)), lambda p, q: e.binary("maximum", p, q)
        )
        d = b.fdiv(largest, e.const(f32, LARGEST))
        inverse = b.fdiv(e.const(f32, LARGEST), largest)
        usable = b.fcmp_ordered("<=", inverse, e.const(f32, MOST_INVERSE))
        inverse = e.splat(b.select(usable, inverse, e.const(f32, 0.0)))
        q = [b.fptosi(e.unary("rint", b.fmul(half, inverse)), vi32) for half in halves]
        for i, half in enumerate(q):
            low = b.trunc(half, bytes16)
            high = b.trunc(b.ashr(b.sub(half, b.sext(low, vi32)), e.const(vi32, 8)), bytes16)
            at = e.at(e.at(out, block, 32), LANES * i)
            e.store(high, at, 16)
            e.store(low, b.add(at, n), 16)
        total = e.reduce(b.add(*q), b.add)
        e.store(d, e.at(scales, block, 4), 4)
        e.store(total, e.at(sums, block, 4), 4)
        e.store(b.fmul(d, b.sitofp(total, f32)), e.at(scaled_sums, block, 4), 4)


quantize_row = emit("quantize_row", types.void, 3, _quantize_row)
