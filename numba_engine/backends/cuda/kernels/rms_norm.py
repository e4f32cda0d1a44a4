"""rms_norm: out = x / sqrt(mean(x²) + eps) * weight, row by row (Zhang & Sennrich 2019).

Arrays (flat): out, x float32 [num_rows, size] (may be the same); weight float32 [size].

A block of 256 threads a row. The row is read twice, the second time from L1 or L2; shared memory holds the 8 warps'
partial sums of squares. Bytes moved: x and weight once, out once. The fused phases take the same sums in the same order
(``reductions.py``), so theirs are these numbers.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.arrays import Array, Norm
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.intrinsics import as_bits, multiply
from numba_engine.backends.cuda.kernels.reductions import inverse_rms, sum_of_squares

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 256
WARPS = THREADS // 32


@cache
def rms_norm_kernel() -> Kernel:
    def rms_norm(out, x, weight, size, eps):  # type: ignore[no-untyped-def]
        warp_sums = cuda.shared.array(WARPS, uint32)
        thread = uint32(cuda.threadIdx.x)
        row = uint32(uint32(cuda.blockIdx.x) * size)
        squares = sum_of_squares(x, row, size)
        if uint32(thread & uint32(31)) == uint32(0):
            warp_sums[uint32(thread >> uint32(5))] = as_bits(squares)
        cuda.syncthreads()
        scale = inverse_rms(warp_sums, uint32(0), size, eps)
        i = thread
        while i < size:
            out[uint32(row + i)] = multiply(multiply(x[uint32(row + i)], scale), weight[i])
            i = uint32(i + uint32(THREADS))

    arguments = (float32[::1], float32[::1], float32[::1], uint32, float32)
    return Kernel("rms_norm", rms_norm, arguments, THREADS)


def launch(backend: CudaBackend, out: Array, x: Array, norm: Norm) -> None:
    num_rows, size = x.shape
    backend.launch(rms_norm_kernel(), num_rows, [out, x, norm.weight, size, norm.eps])
