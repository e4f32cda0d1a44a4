"""read_bandwidth: the speed of plainly reading memory, the limit that streaming weights is measured against.

Sums 64-byte vectors of a buffer larger than any cache, by the same threads, in pieces as the other kernels do.
"""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from numba_engine.backends.cpu.compilation import kernel_address, launcher
from numba_engine.backends.cpu.intrinsics import Emitter, emit, i64, load_i64, store_i64
from numba_engine.backends.cpu.thread_team import ARGS, run

PIECE_BYTES = 1 << 16
_BUFFER, _RESULT = range(2)


@launcher
def read_bandwidth(team: np.ndarray, kernel: int, buffer: np.ndarray) -> None:
    """Read ``buffer`` (uint8, a multiple of PIECE_BYTES) once."""
    result = np.zeros(1, dtype=np.int64)
    team[ARGS + _BUFFER] = buffer.ctypes.data
    team[ARGS + _RESULT] = result.ctypes.data
    run(team, kernel, buffer.size // PIECE_BYTES, 1)


@functools.cache
def read_bandwidth_kernel() -> int:
    def read_pieces(begin: int, end: int, args: int) -> None:
        size = (end - begin) * PIECE_BYTES
        # Written, so that the reads are not optimised away; which thread is last does not matter.
        store_i64(load_i64(args, _RESULT), 0, sum_bytes(load_i64(args, _BUFFER) + begin * PIECE_BYTES, size))

    return kernel_address(read_pieces, "void(int64, int64, int64)")


def _sum_bytes(b: ir.IRBuilder, address: ir.Value, size: ir.Value) -> ir.Value:
    e = Emitter(b)
    vector = ir.VectorType(i64, 8)
    totals = [cgutils.alloca_once(b, vector) for _ in range(4)]
    for total in totals:
        b.store(ir.Constant(vector, None), total)
    with e.loop(b.lshr(size, e.integer(8))) as i:
        for j, total in enumerate(totals):
            b.store(b.add(b.load(total), e.load(e.at(e.at(address, i, 256), 64 * j), vector, 64)), total)
    return e.reduce(b.add(b.add(*map(b.load, totals[:2])), b.add(*map(b.load, totals[2:]))), b.add)


sum_bytes = emit("sum_bytes", types.int64, 2, _sum_bytes)
