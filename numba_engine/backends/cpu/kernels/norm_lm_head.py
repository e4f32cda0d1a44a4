"""norm_lm_head: the rows that want logits, RMSNorm, then one dot product for each token of the vocabulary.

Bit for bit what the unfused ops give.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array, Norm, Weight
from numba_engine.backends.cpu.compilation import launcher
from numba_engine.backends.cpu.kernels.linear import multiply, x_forms
from numba_engine.backends.cpu.kernels.quantize_rows import prepare, prepare_rows_kernel
from numba_engine.backends.cpu.kernels.rms_norm import norm, rms_norm_kernel

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend


def launch(
    backend: CpuBackend, logits: Array, last: Array, residual: Array, rows: Array, norm: Norm, lm_head: Weight
) -> None:
    norm_lm_head(
        backend.team, rms_norm_kernel(), prepare_rows_kernel(), backend.segment_table(lm_head), logits, last, residual,
        rows, norm.weight, norm.eps, backend.prepared(*last.shape),
    )  # fmt: skip


@launcher
def norm_lm_head(
    team: np.ndarray, norm_kernel: int, prepare_rows: int, table: np.ndarray, logits: np.ndarray, last: np.ndarray,
    residual: np.ndarray, rows: np.ndarray, norm_weight: np.ndarray, eps: float, prepared: int,
) -> None:  # fmt: skip
    hidden = residual.shape[1]
    for i in range(rows.size):
        norm(
            team, norm_kernel, last.ctypes.data + i * hidden * 4, residual.ctypes.data + rows[i] * hidden * 4,
            norm_weight.ctypes.data, hidden, 1, eps, 0, 0,
        )  # fmt: skip
    prepare(team, prepare_rows, x_forms(table), prepared, last.ctypes.data, hidden, rows.size)
    multiply(team, table, logits.ctypes.data, logits.shape[1], last.ctypes.data, prepared, hidden, rows.size, 0, 0)
