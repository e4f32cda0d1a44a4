"""rms_norm: out [R, N] = x / sqrt(mean(x²) + eps) * weight [N], row by row (Zhang & Sennrich 2019).

The mean sums 16 lanes of float32 by fma, then the lanes in the fixed order of ``Emitter.reduce``. out may be x.
Bytes moved: x twice (the second time from L1), weight and out once.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from numba_engine.backends.arrays import Array, Norm
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.compilation import inner, kernel_address
from numba_engine.backends.cpu.intrinsics import LANES, Emitter, emit, f32, load_f64, load_i64, store_f64, vf32
from numba_engine.backends.cpu.kernels.quantize_rows import prepare_row
from numba_engine.backends.cpu.thread_team import ARGS, run

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

_OUT, _X, _WEIGHT, _N, _EPS, _PREPARED, _FORMS, _R = range(8)


def launch(backend: CpuBackend, out: Array, x: Array, norm: Norm) -> None:
    rows, n = x.shape
    backend.call(rms_norm, rms_norm_kernel(), out, x, norm.weight, n, rows, norm.eps)


@Command
def rms_norm(team: np.ndarray, kernel: int, out: int, x: int, weight: int, n: int, num_rows: int, eps: float) -> None:
    norm(team, kernel, out, x, weight, n, num_rows, eps, 0, 0)


@inner
def norm(
    team: np.ndarray, kernel: int, out: int, x: int, weight: int, n: int, num_rows: int, eps: float, forms: int,
    prepared: int,
) -> None:  # fmt: skip
    """Post the job; each row is also prepared in the forms wanted, while it is in L1."""
    team[ARGS + _OUT] = out
    team[ARGS + _X] = x
    team[ARGS + _WEIGHT] = weight
    team[ARGS + _N] = n
    store_f64(team.ctypes.data, ARGS + _EPS, eps)
    team[ARGS + _PREPARED] = prepared
    team[ARGS + _FORMS] = forms
    team[ARGS + _R] = num_rows
    run(team, kernel, num_rows, 1 + 8192 // n)


@functools.cache
def rms_norm_kernel() -> int:
    def rms_norm_rows(begin: int, end: int, args: int) -> None:
        n = load_i64(args, _N)
        eps = np.float32(load_f64(args, _EPS))
        for row in range(begin, end):
            out = load_i64(args, _OUT) + row * n * 4
            norm_row(out, load_i64(args, _X) + row * n * 4, load_i64(args, _WEIGHT), n, eps)
            prepare_row(load_i64(args, _FORMS), load_i64(args, _PREPARED), out, n, row, load_i64(args, _R))

    return kernel_address(rms_norm_rows, "void(int64, int64, int64)")


def _norm_row(b: ir.IRBuilder, out: ir.Value, x: ir.Value, weight: ir.Value, n: ir.Value, eps: ir.Value) -> None:
    e = Emitter(b)
    whole = b.lshr(n, e.integer(4))
    start = b.shl(whole, e.integer(4))
    rest = e.first_lanes(b.and_(n, e.integer(LANES - 1)))
    total = cgutils.alloca_once(b, vf32)
    b.store(ir.Constant(vf32, None), total)
    with e.loop(whole) as i:
        v = e.load(e.at(x, i, 4 * LANES), vf32, 4)
        b.store(e.fma(v, v, b.load(total)), total)
    last = e.masked_load(e.at(x, start, 4), vf32, rest, 4)
    squares = e.reduce(e.fma(last, last, b.load(total)), b.fadd)
    mean = b.fdiv(squares, b.sitofp(n, f32))
    scale = e.splat(b.fdiv(e.const(f32, 1.0), e.unary("sqrt", b.fadd(mean, eps))))
    with e.loop(whole) as i:
        v = b.fmul(e.load(e.at(x, i, 4 * LANES), vf32, 4), scale)
        w = e.load(e.at(weight, i, 4 * LANES), vf32, 4)
        e.store(b.fmul(v, w), e.at(out, i, 4 * LANES), 4)
    w = e.masked_load(e.at(weight, start, 4), vf32, rest, 4)
    e.masked_store(b.fmul(b.fmul(last, scale), w), e.at(out, start, 4), rest, 4)


norm_row = emit("norm_row", types.void, 5, _norm_row)
