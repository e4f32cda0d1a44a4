"""add: residual [R, N] += x * scale. Bytes moved: 3 * 4 N a row, in cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.intrinsics import load_f32, store_f32

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend


def launch(backend: CpuBackend, residual: Array, x: Array, scale: float) -> None:
    backend.call(add, residual, x, residual.shape[0] * residual.shape[1], scale)


@Command
def add(team: np.ndarray, residual: int, x: int, count: int, scale: float) -> None:
    factor = np.float32(scale)
    for i in range(count):
        store_f32(residual, i, load_f32(residual, i) + load_f32(x, i) * factor)
