"""gather_rows: out[i] = x[rows[i]].

Arrays (flat): out float32 [num_rows, size]; x float32 [*, size]; rows int32 [num_rows].

A thread an element, no shared memory. Bytes moved: the rows once each way.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from numba_engine.backends.arrays import Array
from numba_engine.backends.cuda.compiler import Kernel

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 256


@cache
def gather_rows_kernel() -> Kernel:
    def gather_rows(out, x, rows, size):  # type: ignore[no-untyped-def]
        i = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if i >= size:
            return
        row = uint32(cuda.blockIdx.x)
        out[uint32(row * size + i)] = x[uint32(uint32(rows[row]) * size + i)]

    return Kernel("gather_rows", gather_rows, (float32[::1], float32[::1], int32[::1], uint32), THREADS)


def launch(backend: CudaBackend, out: Array, x: Array, rows: Array) -> None:
    num_rows, size = out.shape
    backend.launch(gather_rows_kernel(), (num_rows, -(-size // THREADS)), [out, x, rows, size])
