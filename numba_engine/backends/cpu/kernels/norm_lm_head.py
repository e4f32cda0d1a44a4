"""norm_lm_head: the rows that want logits, RMSNorm, then one dot product for each token of the vocabulary.

Bit for bit what the unfused ops give.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array, Norm, Weight
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.intrinsics import load_i32
from numba_engine.backends.cpu.kernels.linear import multiply, segment_table, x_forms
from numba_engine.backends.cpu.kernels.quantize_rows import prepare, prepare_rows_kernel
from numba_engine.backends.cpu.kernels.rms_norm import norm, rms_norm_kernel

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend


def launch(
    backend: CpuBackend, logits: Array, last: Array, residual: Array, rows: Array, norm: Norm, lm_head: Weight
) -> None:
    table = backend.segment_table(lm_head)
    backend.call(
        norm_lm_head, rms_norm_kernel(), prepare_rows_kernel(), table, len(table), norm.weight,
        norm.eps, logits, last, residual, rows, *logits.shape, last.shape[1],
        backend.prepared(*last.shape),
    )  # fmt: skip


@Command
def norm_lm_head(
    team: np.ndarray, norm_kernel: int, prepare_rows: int, table: int, num_segments: int, norm_weight: int, eps: float,
    logits: int, last: int, residual: int, rows: int, num_rows: int, vocab: int, hidden: int, prepared: int,
) -> None:  # fmt: skip
    segments = segment_table(table, num_segments)
    for i in range(num_rows):
        row = np.int64(load_i32(rows, i))
        norm(team, norm_kernel, last + i * hidden * 4, residual + row * hidden * 4, norm_weight, hidden, 1, eps, 0, 0)
    prepare(team, prepare_rows, x_forms(segments), prepared, last, hidden, num_rows)
    multiply(team, segments, logits, vocab, last, prepared, hidden, num_rows, 0, 0)
