"""gather_rows: out [L, N] = x[rows [L]]. Bytes moved: 2 * 4 N a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array
from numba_engine.backends.cpu.compilation import launcher

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend


def launch(backend: CpuBackend, out: Array, x: Array, rows: Array) -> None:
    gather_rows(out, x, rows)


@launcher
def gather_rows(out: np.ndarray, x: np.ndarray, rows: np.ndarray) -> None:
    for i in range(rows.size):
        row = rows[i]
        for k in range(x.shape[1]):
            out[i, k] = x[row, k]
