"""gated_activation: out = gate / (1 + exp(-gate)) * up (SwiGLU; Shazeer 2020).

Arrays (flat): out float32 [num_rows, size]; gate_up float32 [num_rows, 2 size], gate first.

A thread an element, no shared memory. Bytes moved: gate_up once, out once.
"""

from __future__ import annotations

from functools import cache

from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.device import Device, DeviceArray, flat
from numba_engine.backends.cuda.kernels.intrinsics import divide, exp2

THREADS = 256
LOG2_E = 1.4426950408889634


@cuda.jit(device=True, inline="always")
def silu_times(gate, up):  # type: ignore[no-untyped-def]
    return divide(gate, float32(float32(1) + exp2(float32(gate * float32(-LOG2_E))))) * up


@cache
def gated_activation_kernel() -> Kernel:
    def gated_activation(out, gate_up, size):  # type: ignore[no-untyped-def]
        i = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if i >= size:
            return
        row = uint32(cuda.blockIdx.x)
        gate = gate_up[uint32(row * size * uint32(2) + i)]
        up = gate_up[uint32(row * size * uint32(2) + size + i)]
        out[uint32(row * size + i)] = silu_times(gate, up)

    return Kernel("gated_activation", gated_activation, (float32[::1], float32[::1], uint32), THREADS)


def gated_activation(device: Device, out: DeviceArray, gate_up: DeviceArray) -> None:
    num_rows, size = out.shape
    device.launch(gated_activation_kernel(), (num_rows, -(-size // THREADS)), [flat(out), flat(gate_up), size])
