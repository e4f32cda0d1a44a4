"""linear_add: residual += x @ weight.T, by the kernels of ``linear``, which add what they have to what is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_engine.backends.arrays import Array, Weight
from numba_engine.backends.cuda.kernels.linear import multiply

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend


def launch(backend: CudaBackend, residual: Array, x: Array, weight: Weight) -> None:
    multiply(backend, residual, x, weight, None, add=True)
