"""linear_add: residual [R, out_features] += x [R, in_features] @ weight.T, by the kernels of linear.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_engine.backends.arrays import Array, Weight
from numba_engine.backends.cpu.kernels.linear import multiply_by

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend


def launch(backend: CpuBackend, residual: Array, x: Array, weight: Weight) -> None:
    multiply_by(backend, residual, x, weight, None, add=True)
