"""cap_logits: logits x become x * scale, and those softcap * tanh(x / softcap) where there is a softcap.

Arrays (flat): logits float32 [size].

A thread an element, no shared memory. Bytes moved: the logits once each way.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.arrays import Array
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.soft_cap import LOG2_E, soft_capped

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 256


@cache
def cap_logits_kernel(has_softcap: bool) -> Kernel:
    def cap_logits(logits, size, scale, softcap):  # type: ignore[no-untyped-def]
        i = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if i < size:
            x = float32(logits[i] * scale)
            if has_softcap:
                x = soft_capped(x, softcap, float32(float32(2 * LOG2_E) / softcap))
            logits[i] = x

    name = "cap_logits" if has_softcap else "scale_logits"
    return Kernel(name, cap_logits, (float32[::1], uint32, float32, float32), THREADS)


def launch(backend: CudaBackend, logits: Array, scale: float, softcap: float | None) -> None:
    size = logits.shape[0] * logits.shape[1]
    backend.launch(cap_logits_kernel(softcap is not None), -(-size // THREADS), [logits, size, scale, softcap or 0.0])
