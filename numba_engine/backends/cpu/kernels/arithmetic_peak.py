"""arithmetic_peak: how fast the cores multiply and add with nothing to wait for, the limit of compute-bound ops.

Each thread runs the instruction that ``linear`` multiplies with, over registers and 4 KB that lie in L1: dot products
of bytes (``Emitter.dot4``) or of bf16 (``dot2``), or float32 fma. The accumulators are more than latency times ports,
and what they are fed changes, so that nothing can be worked out beforehand.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from numba_engine.backends.cpu.compilation import kernel_address, launcher
from numba_engine.backends.cpu.intrinsics import (
    LANES,
    Emitter,
    InstructionSet,
    emit,
    i64,
    load_i64,
    store_i64,
    vf32,
    vi8x64,
    vi32,
)
from numba_engine.backends.cpu.kernels.quantize_rows import BF16, F32, INT8
from numba_engine.backends.cpu.thread_team import ARGS, run

ITERATIONS = 4096
"""Of one piece of work."""
_ACCUMULATORS = 12
_BUFFER_VECTORS = 64
BUFFER_BYTES = 64 * _BUFFER_VECTORS
_BUFFER, _RESULT = range(2)

MULTIPLY_ADDS = {form: ITERATIONS * _ACCUMULATORS * LANES * lanes for form, lanes in ((INT8, 4), (BF16, 2), (F32, 1))}
"""In one piece, by what weights are multiplied with (``quantize_rows.py``)."""


@launcher
def arithmetic_peak(team: np.ndarray, kernel: int, buffer: np.ndarray, pieces: int) -> None:
    """Run ``pieces`` pieces of work over ``buffer`` (uint8 [BUFFER_BYTES], aligned to 64 bytes)."""
    result = np.zeros(1, dtype=np.int64)
    team[ARGS + _BUFFER] = buffer.ctypes.data
    team[ARGS + _RESULT] = result.ctypes.data
    run(team, kernel, pieces, 1)


@functools.cache
def arithmetic_peak_kernel(form: int, isa: InstructionSet) -> int:
    multiply = _multiply(form, isa)

    def multiply_pieces(begin: int, end: int, args: int) -> None:
        # Written, so that the work is not optimised away; which thread is last does not matter.
        store_i64(load_i64(args, _RESULT), 0, multiply(load_i64(args, _BUFFER), (end - begin) * ITERATIONS))

    return kernel_address(multiply_pieces, "void(int64, int64, int64)", f"{form} {isa}")


def _multiply(form: int, isa: InstructionSet) -> Any:
    operand, vector = {INT8: (vi8x64, vi32), BF16: (vi32, vf32), F32: (vf32, vf32)}[form]

    def body(b: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
        e = Emitter(b, isa)
        multiply_add = {INT8: e.dot4, BF16: e.dot2, F32: lambda sums, x, y: e.fma(x, y, sums)}[form]
        add = b.add if form == INT8 else b.fadd
        accumulators = [cgutils.alloca_once(b, vector) for _ in range(_ACCUMULATORS)]
        for accumulator in accumulators:
            b.store(ir.Constant(vector, None), accumulator)
        others = [e.load(e.at(address, 64 * i), operand, 64) for i in range(_ACCUMULATORS)]
        with e.loop(count) as i:
            fed = e.load(e.at(address, b.and_(i, e.integer(_BUFFER_VECTORS - 1)), 64), operand, 64)
            for accumulator, other in zip(accumulators, others, strict=True):
                b.store(multiply_add(b.load(accumulator), fed, other), accumulator)
        total = b.load(accumulators[0])
        for accumulator in accumulators[1:]:
            total = add(total, b.load(accumulator))
        return b.extract_element(b.bitcast(total, ir.VectorType(i64, LANES // 2)), ir.Constant(i64, 0))

    return emit("multiply", types.int64, 2, body)
