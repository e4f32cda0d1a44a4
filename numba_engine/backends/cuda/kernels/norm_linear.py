"""norm_linear: out = RMSNorm(x[rows]) @ weight.T (+ bias); equal to gather_rows, rms_norm and linear, bit by bit.

Arrays (flat): out float32 [num_rows, out_stride]; x float32 [*, in_features]; rows int32 [num_rows] (if gathered);
norm_weight float32 [in_features]; weights, bias as ``linear``.

Every block normalises x anew while it stages it: x comes from L2, and the first weights are on their way already. No
weight waits for a kernel that only normalises. Bytes moved: weights once, x and norm_weight a few times a block.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numba.cuda.types import float32, int32, uint32

from numba_engine.backends.arrays import Array, Norm, Weight
from numba_engine.backends.cuda.arrays import viewed
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.linear import neighbours, write_outputs
from numba_engine.backends.cuda.kernels.packing import num_tiles
from numba_engine.backends.cuda.kernels.streaming import (
    MIN_BLOCKS,
    THREADS,
    TOKENS,
    ahead_of,
    stream,
    stream_grid,
    tokens_for,
)
from numba_engine.backends.cuda.kernels.unrolling import unroll_into
from numba_engine.formats import F32, Format, label

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend


@cache
def norm_linear_kernel(format: Format, tokens: int, is_gathered: bool) -> Kernel:
    body = stream(format, tokens, neighbours, write_outputs, is_normed=True, is_gathered=is_gathered)

    def norm_linear(  # type: ignore[no-untyped-def]
        out, x, rows, norm_weight, weights, bias, eps, num_rows, in_features, out_features, num_pairs, out_stride,
        out_offset, has_bias, ahead, num_lines,
    ):  # fmt: skip
        return (
            x, (norm_weight, eps, rows), weights, num_rows, in_features, num_pairs, (),
            (out, bias, out_features, out_stride, out_offset, uint32(0), has_bias), ahead, num_lines,
        )  # fmt: skip

    arrays = (float32[::1], float32[::1], int32[::1], float32[::1], uint32[::1], float32[::1])
    name = f"norm_linear_{label(format)}{'_rows' if is_gathered else ''}_x{tokens}"
    return Kernel(
        name,
        unroll_into(norm_linear, body),
        (*arrays, float32, *[uint32] * 7, uint32[::1], uint32),
        THREADS,
        MIN_BLOCKS,
    )


def fuses_norm(num_rows: int, weight: Weight) -> bool:
    """Whether RMSNorm can be part of the matrix product that follows.

    It is for as many rows as one pass over the weights serves. Beyond that the ops by themselves are as good: their
    time is the tensor cores', and a kernel that normalises is a small part of it.
    """
    return num_rows <= TOKENS[-1] and all(segment.format is not F32 for segment in weight.segments)


def launch(
    backend: CudaBackend,
    out: Array,
    x: Array,
    norm: Norm,
    weight: Weight,
    *,
    rows: Array | None = None,
    bias: Array | None = None,
) -> None:
    """out [R, out_features] = RMSNorm(x or x[rows]) @ weight.T (+ bias), where ``fuses_norm``; a launch a segment."""
    (num_rows, out_stride), in_features = out.shape, x.shape[1]
    tokens, first_feature, next_weights = tokens_for(num_rows), 0, backend.next_weights(weight)
    for segment in weight.segments:
        pairs = num_tiles(segment.num_rows) // 2
        some_rows = viewed(segment.data, np.int32) if rows is None else rows
        arrays = [out, x, some_rows, norm.weight, segment.data, norm.weight if bias is None else bias]
        sizes = [num_rows, in_features, segment.num_rows, pairs, out_stride, first_feature, int(bias is not None)]
        kernel = norm_linear_kernel(segment.format, tokens, rows is not None)
        ahead = ahead_of(next_weights if segment is weight.segments[-1] else None, segment.data, num_rows)
        grid = stream_grid(backend.device, pairs, num_rows, tokens)
        backend.launch(kernel, grid, [*arrays, norm.eps, *sizes, *ahead])
        first_feature += segment.num_rows
