"""add: residual += x * scale.

Arrays (flat): residual, x float32 [size].

A thread an element, no shared memory. Bytes moved: both once, and residual back.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.arrays import Array
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.intrinsics import multiply

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 256


@cache
def add_kernel() -> Kernel:
    def add(residual, x, size, scale):  # type: ignore[no-untyped-def]
        i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if i < size:
            residual[i] = float32(residual[i] + multiply(x[i], scale))

    return Kernel("add", add, (float32[::1], float32[::1], uint32, float32), THREADS)


def launch(backend: CudaBackend, residual: Array, x: Array, scale: float) -> None:
    size = residual.shape[0] * residual.shape[1]
    backend.launch(add_kernel(), -(-size // THREADS), [residual, x, size, scale])
