"""quantize_rows: activations in the form that weights are multiplied with, once for all rows of a weight.

Quantised weights take integers per 32 values:

    d = max|x| / 32512;   q = round_to_even(x / d) = 256 high + low;   and the sums that zero points and minima need

q is kept as two planes of int8, so that int8 dot instructions make exact 16-bit products of it. One plane alone (what
ggml does, Q8_1) moved the log-probabilities of SmolLM2 by 0.15 in the mean, two move them by 0.0015; decoding waits for
memory either way, prompts take 1.8 times as long as with one.

INT8: x [R, N] float32 → [R] rows of high int8 [N], low int8 [N], d f32 [N/32], sum(q) i32 [N/32], d * sum(q) f32
[N/32], and, written only for weights with scales per 16, (sum(low), sum(high)) i16 [N/16, 2]. N is a multiple of 32.
A NaN makes its block's d NaN.

BF16 weights take x rounded to bf16 (to nearest even), as llama.cpp and PyTorch do, where bf16 dot instructions make
prompts 1.6 times as fast as float32 fma. It moves the log-probabilities of SmolLM2 by 0.01 to 0.03 in the mean; two
planes of bf16 move them by less than 0.0001 but take as long as float32.

BF16: x [R, N] float32 → [R] rows of bf16 [N], zeros up to a multiple of 16.

Bytes moved: 4 N in and 2.6 N or 2 N out a row, in cache.
"""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import types

from numba_engine.backends.cpu.compilation import inner, kernel_address
from numba_engine.backends.cpu.intrinsics import LANES, Emitter, emit, f32, i8, load_i64, vf32, vi16, vi32
from numba_engine.backends.cpu.thread_team import ARGS, run

F32, INT8, BF16 = 0, 1, 2
"""Forms of x that a weight may be multiplied with; the last two are made of the first, and may be or'ed."""
RUN_SUMS = 4
"""Or'ed to INT8 for weights that have scales of 16 values: with the sums of 16."""

_PREPARED, _X, _N, _R, _FORMS = range(5)
LARGEST = 127.0 * 256
MOST_INVERSE = 3e38  # blocks smaller than this can scale are taken as zero


def prepared_bytes(num_rows: int, in_features: int) -> int:
    """At least the bytes of x in all forms but float32, and of a vector read past the end; cheap for every call."""
    return num_rows * (5 * in_features + 128) + 64  # 84 and 64 a block of 32, each row of each form up to 63 more


@inner
def x_stride(form: int, in_features: int) -> int:
    """Bytes of a row of x; a multiple of 64 but for float32."""
    if form & INT8:
        return (in_features // 32 * (64 + 12 + 8) + 63) // 64 * 64
    if form == BF16:
        return 64 * ((in_features + 31) // 32)
    return 4 * in_features


@inner
def x_place(form: int, x: int, prepared: int, in_features: int, num_rows: int) -> int:
    """Address of x in this form: itself, or within ``prepared``."""
    if form == F32:
        return x
    return prepared + (num_rows * x_stride(INT8, in_features) if form == BF16 else 0)


@inner
def prepare(team: np.ndarray, kernel: int, forms: int, prepared: int, x: int, in_features: int, num_rows: int) -> None:
    """x [num_rows, in_features] float32 in all the forms wanted."""
    if forms == F32:
        return
    team[ARGS + _PREPARED] = prepared
    team[ARGS + _X] = x
    team[ARGS + _N] = in_features
    team[ARGS + _R] = num_rows
    team[ARGS + _FORMS] = forms
    run(team, kernel, num_rows, 1 + 16384 // in_features)


@functools.cache
def prepare_rows_kernel() -> int:
    def prepare_rows(begin: int, end: int, args: int) -> None:
        n = load_i64(args, _N)
        for row in range(begin, end):
            prepare_row(
                load_i64(args, _FORMS), load_i64(args, _PREPARED), load_i64(args, _X) + row * n * 4, n, row,
                load_i64(args, _R),
            )  # fmt: skip

    return kernel_address(prepare_rows, "void(int64, int64, int64)")


@inner
def prepare_row(forms: int, prepared: int, x: int, in_features: int, row: int, num_rows: int) -> None:
    """One of ``num_rows`` rows."""
    if forms & INT8:
        quantize_row(prepared + row * x_stride(INT8, in_features), x, in_features, forms & RUN_SUMS)
    if forms & BF16:
        place = x_place(BF16, x, prepared, in_features, num_rows)
        round_row(place + row * x_stride(BF16, in_features), x, in_features)


def _quantize_row(b: ir.IRBuilder, out: ir.Value, x: ir.Value, n: ir.Value, with_run_sums: ir.Value) -> None:
    e = Emitter(b)
    blocks = b.lshr(n, e.integer(5))
    low_plane = e.at(out, n)
    scales = e.at(low_plane, n)
    sums = e.at(scales, blocks, 4)
    scaled_sums = e.at(sums, blocks, 4)
    run_sums = e.at(scaled_sums, blocks, 4)
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
        both_sums = []
        for i, half in enumerate(q):
            low = b.trunc(half, bytes16)
            wide_low = b.sext(low, vi32)
            rest = b.sub(half, wide_low)  # 256 high
            at = e.at(e.at(out, block, 32), LANES * i)
            e.store(b.trunc(b.ashr(rest, e.const(vi32, 8)), bytes16), at, 16)
            e.store(low, b.add(at, n), 16)
            both_sums.append(b.add(b.shl(rest, e.const(vi32, 8)), wide_low))
        with b.if_then(b.icmp_signed("!=", with_run_sums, e.integer(0))):
            # 65536 sum(high) + sum(low), |sum(low)| ≤ 2048, becomes two numbers of 16 bits.
            sums16 = e.reduce_pair(*both_sums)
            borrow = e.const(sums16.type, 0x8000)
            e.store(b.xor(b.add(sums16, borrow), borrow), e.at(run_sums, block, 8), 8)
        total = e.reduce(b.add(*q), b.add)
        e.store(d, e.at(scales, block, 4), 4)
        e.store(total, e.at(sums, block, 4), 4)
        e.store(b.fmul(d, b.sitofp(total, f32)), e.at(scaled_sums, block, 4), 4)


quantize_row = emit("quantize_row", types.void, 4, _quantize_row)


def _round_row(b: ir.IRBuilder, out: ir.Value, x: ir.Value, n: ir.Value) -> None:
    e = Emitter(b)

    def write(i: ir.Value, values: ir.Value) -> None:
        bits = b.bitcast(values, vi32)
        last = b.and_(b.lshr(bits, e.const(vi32, 16)), e.const(vi32, 1))
        rounded = b.add(b.add(bits, e.const(vi32, 0x7FFF)), last)
        quiet = b.or_(bits, e.const(vi32, 1 << 22))
        rounded = b.select(b.fcmp_unordered("uno", values, values), quiet, rounded)
        e.store(b.trunc(b.lshr(rounded, e.const(vi32, 16)), vi16), e.at(out, i, 2 * LANES), 32)

    whole = b.lshr(n, e.integer(4))
    with e.loop(whole) as i:
        write(i, e.load(e.at(x, i, 4 * LANES), vf32, 4))
    left = b.and_(n, e.integer(LANES - 1))
    with b.if_then(b.icmp_signed("!=", left, e.integer(0))):
        write(whole, e.masked_load(e.at(x, whole, 4 * LANES), vf32, e.first_lanes(left), 4))


round_row = emit("round_row", types.void, 3, _round_row)
