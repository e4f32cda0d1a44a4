"""read_bandwidth: plainly read memory, as the yardstick of every other kernel.

Arrays (flat): out uint32 [grid]; data uint32, a multiple of 4 of them.

All blocks stride through the data together, a lane 16 bytes at a time, 4 independent loads in flight; the words are
XOR-ed so that no load is idle. Bytes moved: data once.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numba import cuda
from numba.cuda.types import uint32

from numba_engine.backends.arrays import Array
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.intrinsics import load_weights

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 512
LOADS = 4
BLOCKS = 1024
"""Several for every multiprocessor of any GPU; each strides."""


@cache
def read_bandwidth_kernel() -> Kernel:
    def read_bandwidth(out, data, num_quads):  # type: ignore[no-untyped-def]
        threads = uint32(uint32(cuda.gridDim.x) * uint32(THREADS))
        quad = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        mixed = uint32(0)
        while uint32(quad + threads * uint32(LOADS - 1)) < num_quads:
            a = load_weights(data, uint32(quad * uint32(4)))
            b = load_weights(data, uint32((quad + threads) * uint32(4)))
            c = load_weights(data, uint32((quad + threads * uint32(2)) * uint32(4)))
            d = load_weights(data, uint32((quad + threads * uint32(3)) * uint32(4)))
            for i in range(4):
                mixed = uint32(mixed ^ a[i] ^ b[i] ^ c[i] ^ d[i])
            quad = uint32(quad + threads * uint32(LOADS))
        while quad < num_quads:
            a = load_weights(data, uint32(quad * uint32(4)))
            mixed = uint32(mixed ^ a[0] ^ a[1] ^ a[2] ^ a[3])
            quad = uint32(quad + threads)
        if mixed == uint32(0x9E3779B9):  # one value of 2^32: the loads must happen, the store hardly ever
            out[cuda.blockIdx.x] = mixed

    return Kernel("read_bandwidth", read_bandwidth, (uint32[::1], uint32[::1], uint32), THREADS)


def launch(backend: CudaBackend, data: Array, *, blocks: int = BLOCKS) -> None:
    """Read the whole array, of uint32, once."""
    out = backend.empty((blocks,), np.dtype(np.uint32))
    backend.launch(read_bandwidth_kernel(), blocks, [out, data, data.nbytes // 16])
