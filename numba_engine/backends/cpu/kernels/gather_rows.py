"""gather_rows: out [L, N] = x[rows [L]]. Bytes moved: 2 * 4 N a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.intrinsics import load_f32, load_i32, store_f32

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend


def launch(backend: CpuBackend, out: Array, x: Array, rows: Array) -> None:
    backend.call(gather_rows, out, x, rows, *out.shape)


@Command
def gather_rows(team: np.ndarray, out: int, x: int, rows: int, num_rows: int, n: int) -> None:
    for i in range(num_rows):
        source = x + np.int64(load_i32(rows, i)) * n * 4
        for k in range(n):
            store_f32(out, i * n + k, load_f32(source, k))
