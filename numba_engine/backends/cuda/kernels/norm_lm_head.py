"""norm_lm_head: logits = RMSNorm(residual[rows]) @ lm_head.T, by the kernels of ``norm_linear``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_engine.backends.arrays import Array, Norm, Weight
from numba_engine.backends.cuda.kernels import norm_linear

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend


def supports(
    backend: CudaBackend, logits: Array, last: Array, residual: Array, rows: Array, norm: Norm, lm_head: Weight
) -> bool:
    return norm_linear.fuses_norm(logits.shape[0], lm_head)


def launch(
    backend: CudaBackend, logits: Array, last: Array, residual: Array, rows: Array, norm: Norm, lm_head: Weight
) -> None:
    norm_linear.launch(backend, logits, residual, norm, lm_head, rows=rows)
