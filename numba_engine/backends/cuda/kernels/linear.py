"""linear: out = x @ weight.T (+ bias) (+ out), from a single row of x to many, on tensor cores.

Arrays (all flat)
    out      float32 [num_rows, out_stride], columns out_offset … out_offset + out_features
    x        float32 [num_rows, in_features], in_features a multiple of 4
    weights  uint32, packed (``packing.py``), of any format but F32 (``linear_f32.py``)
    bias     float32 [out_stride] (read if has_bias)

The loop is that of ``streaming``, the arithmetic that of ``planes``. A block makes 32 neighbouring outputs for up to 16
rows of x; more rows repeat the grid. From ``MANY_ROWS`` on it is ``gemm``'s, with the same bits. Bytes moved: every
weight byte once per 16 rows of x; x once a block, out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.arrays import Array, Segment, Weight
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels import gemm
from numba_engine.backends.cuda.kernels.gemm import write_output
from numba_engine.backends.cuda.kernels.linear_f32 import ROWS, linear_f32_kernel
from numba_engine.backends.cuda.kernels.packing import num_tiles
from numba_engine.backends.cuda.kernels.streaming import MIN_BLOCKS, THREADS, ahead_of, stream, stream_grid, tokens_for
from numba_engine.backends.cuda.kernels.unrolling import unroll_into
from numba_engine.formats import F32, Format, label

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

MANY_ROWS = 33
"""From here on ``gemm`` reads the weights less often than a third pass over them would."""


@cuda.jit(device=True, inline="always")
def neighbours(pair, shape):  # type: ignore[no-untyped-def]
    return uint32(pair * uint32(2)), uint32(pair * uint32(2) + uint32(1))


@cuda.jit(device=True, inline="always")
def write_outputs(arguments, pair, row, token, a, b):  # type: ignore[no-untyped-def]
    out, bias, out_features, out_stride, out_offset, add, has_bias = arguments
    column = uint32(pair * uint32(32) + row)
    write_output(out, bias, token, column, a, out_features, out_stride, out_offset, add, has_bias)
    write_output(out, bias, token, uint32(column + uint32(16)), b, out_features, out_stride, out_offset, add, has_bias)


@cache
def linear_kernel(format: Format, tokens: int) -> Kernel:
    """The kernel of one storage format that serves ``tokens`` rows of x a pass."""
    body = stream(format, tokens, neighbours, write_outputs)

    def linear(  # type: ignore[no-untyped-def]
        out,
        x,
        weights,
        bias,
        num_rows,
        in_features,
        out_features,
        num_pairs,
        out_stride,
        out_offset,
        add,
        has_bias,
        ahead,
        num_lines,
    ):
        return (
            x,
            (),
            weights,
            num_rows,
            in_features,
            num_pairs,
            (),
            (out, bias, out_features, out_stride, out_offset, add, has_bias),
            ahead,
            num_lines,
        )

    arguments = (float32[::1], float32[::1], uint32[::1], float32[::1], *[uint32] * 8, uint32[::1], uint32)
    return Kernel(f"linear_{label(format)}_x{tokens}", unroll_into(linear, body), arguments, THREADS, MIN_BLOCKS)


def launch(backend: CudaBackend, out: Array, x: Array, weight: Weight, bias: Array | None = None) -> None:
    multiply(backend, out, x, weight, bias, add=False)


def multiply(backend: CudaBackend, out: Array, x: Array, weight: Weight, bias: Array | None, *, add: bool) -> None:
    """out [R, out_features] = x @ weight.T (+ bias), or += with ``add``. A launch (two) a segment of equal format."""
    (num_rows, in_features), first_feature = x.shape, 0
    num_words = _staging_words(weight.segments, num_rows, in_features)
    staging = backend.empty((num_words,), np.dtype(np.uint32)) if num_words else None
    next_weights = backend.next_weights(weight)
    for segment in weight.segments:
        arrays = [out, x, segment.data, x if bias is None else bias]
        sizes, rest = [num_rows, in_features, segment.num_rows], [first_feature, int(add), int(bias is not None)]
        if segment.format is F32:
            tokens = 1 if num_rows == 1 else 4
            grid = -(-segment.num_rows // ROWS), -(-num_rows // tokens)
            backend.launch(linear_f32_kernel(tokens), grid, [*arrays, *sizes, out.shape[1], *rest])
        elif staging is not None:
            gemm.launch(backend, out, x, staging, segment, arrays[3], rest)
        else:
            tokens, pairs = tokens_for(num_rows), num_tiles(segment.num_rows) // 2
            kernel, grid = linear_kernel(segment.format, tokens), stream_grid(backend.device, pairs, num_rows, tokens)
            ahead = ahead_of(next_weights if segment is weight.segments[-1] else None, segment.data, num_rows)
            backend.launch(kernel, grid, [*arrays, *sizes, pairs, out.shape[1], *rest, *ahead])
        first_feature += segment.num_rows


def _staging_words(segments: Sequence[Segment], num_rows: int, in_features: int) -> int:
    """uint32 words of scratch for many rows, 0 for few."""
    if num_rows < MANY_ROWS:
        return 0
    formats = {segment.format for segment in segments} - {F32}
    return max((gemm.staged_words(format, num_rows, in_features) for format in formats), default=0)
