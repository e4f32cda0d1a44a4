"""quantize_rows: activations to int8 per 32 values, what ggml calls Q8_1, once for all rows of a weight.

    d = max|x| / 127;   q = round_to_even(x / d);   and the sums that the weights' zero points and minima need

x [R, N] float32 → [R] rows of ``x_int8_stride(N)`` bytes: q int8 [N], d f32 [N/32], sum(q) i32 [N/32],
d * sum(q) f32 [N/32]. N is a multiple of 32. Bytes moved: 4 N + 1.4 N a row, all in cache.
"""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import types

from numba_engine.backends.cpu.compilation import inner, kernel_address
from numba_engine.backends.cpu.intrinsics import Emitter, emit, f32, i8, load_i64, vf32, vi32
from numba_engine.backends.cpu.thread_team import ARGS, run

_X_INT8, _X, _N = 0, 1, 2


@inner
def x_int8_stride(in_features: int) -> int:
    """Bytes of a row of int8 activations, 64-aligned."""
    return (in_features // 32 * (32 + 12) + 63) // 64 * 64


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
    blocks = b.lshr(n, e.int(5))
    scales = e.at(out, n)
    sums = e.at(scales, blocks, 4)
    scaled_sums = e.at(sums, blocks, 4)
    with e.loop(blocks) as block:
        low = e.load(e.at(x, block, 128), vf32, 4)
        high = e.load(e.at(e.at(x, block, 128), 64), vf32, 4)
        largest = e.reduce(
            e.binary("maxnum", e.unary("fabs", low), e.unary("fabs", high)), lambda p, q: e.binary("maxnum", p, q)
        )
        d = b.fdiv(largest, e.const(f32, 127.0))
        nonzero = b.fcmp_ordered("!=", d, e.const(f32, 0.0))
        inverse = b.select(nonzero, b.fdiv(e.const(f32, 127.0), largest), e.const(f32, 0.0))
        halves = [b.fptosi(e.unary("rint", b.fmul(half, e.splat(inverse))), vi32) for half in (low, high)]
        for i, half in enumerate(halves):
            e.store(b.trunc(half, ir.VectorType(i8, 16)), e.at(e.at(out, block, 32), 16 * i), 16)
        total = e.reduce(b.add(*halves), b.add)
        e.store(d, e.at(scales, block, 4), 4)
        e.store(total, e.at(sums, block, 4), 4)
        e.store(b.fmul(d, b.sitofp(total, f32)), e.at(scaled_sums, block, 4), 4)


quantize_row = emit("quantize_row", types.void, 3, _quantize_row)
