"""gather_rows: out [L, N] = x[rows [L]]. Bytes moved: 2 * 4 N a row."""

from __future__ import annotations

import numpy as np

from numba_engine.backends.cpu.compilation import launcher


@launcher
def gather_rows(out: np.ndarray, x: np.ndarray, rows: np.ndarray) -> None:
    for i in range(rows.size):
        row = rows[i]
        for k in range(x.shape[1]):
            out[i, k] = x[row, k]
