"""gated_activation: out = activation(gate) * up (Shazeer 2020): gate / (1 + exp(-g)) * up, with g = gate in silu.

Arrays (flat): out float32 [num_rows, size]; gate_up float32 [num_rows, 2 size], gate first.

A thread an element, no shared memory. Bytes moved: gate_up once, out once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.arrays import Array
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.intrinsics import divide, exp2, fma
from numba_engine.backends.layers import GELU_CUBIC, GELU_LINEAR, Activation

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 256
LOG2_E = 1.4426950408889634


@cuda.jit(device=True, inline="always")
def _silu_times(gate, up):  # type: ignore[no-untyped-def]
    return divide(gate, float32(float32(1) + exp2(float32(gate * float32(-LOG2_E))))) * up


@cuda.jit(device=True, inline="always")
def _gelu_tanh_times(gate, up):  # type: ignore[no-untyped-def]
    power = float32(gate * fma(float32(gate * gate), float32(-LOG2_E * GELU_CUBIC), float32(-LOG2_E * GELU_LINEAR)))
    return divide(gate, float32(float32(1) + exp2(power))) * up


ACTIVATION_TIMES: Mapping[Activation, Any] = {"silu": _silu_times, "gelu_tanh": _gelu_tanh_times}


def name_with(activation: Activation, name: str) -> str:
    """Of a kernel that is specialised for an activation."""
    return name if activation == "silu" else f"{name}_{activation}"


@cache
def gated_activation_kernel(activation: Activation) -> Kernel:
    activation_times = ACTIVATION_TIMES[activation]

    def gated_activation(out, gate_up, size):  # type: ignore[no-untyped-def]
        i = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if i >= size:
            return
        row = uint32(cuda.blockIdx.x)
        gate = gate_up[uint32(row * size * uint32(2) + i)]
        up = gate_up[uint32(row * size * uint32(2) + size + i)]
        out[uint32(row * size + i)] = activation_times(gate, up)

    return Kernel(
        name_with(activation, "gated_activation"), gated_activation, (float32[::1], float32[::1], uint32), THREADS
    )


def launch(backend: CudaBackend, out: Array, gate_up: Array, activation: Activation) -> None:
    num_rows, size = out.shape
    backend.launch(gated_activation_kernel(activation), (num_rows, -(-size // THREADS)), [out, gate_up, size])
