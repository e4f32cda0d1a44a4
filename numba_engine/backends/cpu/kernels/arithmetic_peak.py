"""arithmetic_peak: how fast the cores multiply and add with nothing to wait for, the limit of compute-bound ops.

Each thread runs the instruction that ``linear`` multiplies with, over registers and 4 KB that lie in L1: dot products
of bytes (``Emitter.dot4``) or float32 fma. The accumulators are more than latency times ports, and what they are fed
changes, so that nothing can be worked out beforehand.
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
from numba_engine.backends.cpu.thread_team import ARGS, run

ITERATIONS = 4096
"""Of one piece of work."""
_ACCUMULATORS = 12
_BUFFER_VECTORS = 64
BUFFER_BYTES = 64 * _BUFFER_VECTORS
_BUFFER, _RESULT = range(2)

MULTIPLY_ADDS = {True: ITERATIONS * _ACCUMULATORS * LANES * 4, False: ITERATIONS * _ACCUMULATORS * LANES}
"""In one piece, by whether bytes are multiplied."""


@launcher
def arithmetic_peak(team: np.ndarray, kernel: int, buffer: np.ndarray, pieces: int) -> None:
    """Run ``pieces`` pieces of work over ``buffer`` (uint8 [BUFFER_BYTES], aligned to 64 bytes)."""
    result = np.zeros(1, dtype=np.int64)
    team[ARGS + _BUFFER] = buffer.ctypes.data
    team[ARGS + _RESULT] = result.ctypes.data
    run(team, kernel, pieces, 1)


@functools.cache
def arithmetic_peak_kernel(int8: bool, isa: InstructionSet) -> int:
    multiply = _multiply(int8, isa)

    def multiply_pieces(begin: int, end: int, args: int) -> None:
        # Written, so that the work is not optimised away; which thread is last does not matter.
        store_i64(load_i64(args, _RESULT), 0, multiply(load_i64(args, _BUFFER), (end - begin) * ITERATIONS))

    return kernel_address(multiply_pieces, "void(int64, int64, int64)", f"{'int8' if int8 else 'float32'} {isa}")


def _multiply(int8: bool, isa: InstructionSet) -> Any:
    vector = vi32 if int8 else vf32

    def body(b: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
        e = Emitter(b, isa)
        operand = vi8x64 if int8 else vf32
        accumulators = [cgutils.alloca_once(b, vector) for _ in range(_ACCUMULATORS)]
        for accumulator in accumulators:
            b.store(ir.Constant(vector, None), accumulator)
        others = [e.load(e.at(address, 64 * i), operand, 64) for i in range(_ACCUMULATORS)]
        with e.loop(count) as i:
            fed = e.load(e.at(address, b.and_(i, e.integer(_BUFFER_VECTORS - 1)), 64), operand, 64)
            for accumulator, other in zip(accumulators, others, strict=True):
                so_far = b.load(accumulator)
                b.store(e.dot4(so_far, fed, other) if int8 else e.fma(fed, other, so_far), accumulator)
        total = b.load(accumulators[0])
        for accumulator in accumulators[1:]:
            total = b.add(total, b.load(accumulator)) if int8 else b.fadd(total, b.load(accumulator))
        return b.extract_element(b.bitcast(total, ir.VectorType(i64, LANES // 2)), ir.Constant(i64, 0))

    return emit("multiply", types.int64, 2, body)
