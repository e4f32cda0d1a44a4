"""linear: out = x @ weight.T (+ bias) (+ out), from a single row of x to many, on tensor cores.

Arrays (all flat)
    out      float32 [num_rows, out_stride], columns out_offset … out_offset + out_features
    x        float32 [num_rows, in_features], in_features a multiple of 4
    weights  uint32, packed (``packing.py``): F16, BF16, Q8_0, Q4_0 or Q4_1 (F32: ``linear_f32.py``)
    bias     float32 [out_stride] (read if has_bias)

The loop is that of ``streaming``, the arithmetic that of ``planes``. A block makes 32 neighbouring outputs for up to 16
rows of x; more rows repeat the grid. From ``MANY_ROWS`` on it is ``gemm``'s, with the same bits. Bytes moved: every
weight byte once per 16 rows of x; x once a block, out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.device import Device, DeviceArray, flat
from numba_engine.backends.cuda.kernels.gemm import gemm, staged_words, write_output
from numba_engine.backends.cuda.kernels.linear_f32 import ROWS, linear_f32_kernel
from numba_engine.backends.cuda.kernels.packing import num_tiles
from numba_engine.backends.cuda.kernels.streaming import MIN_BLOCKS, THREADS, ahead_of, stream, stream_grid, tokens_for
from numba_engine.backends.cuda.kernels.unrolling import unroll_into
from numba_engine.formats import F32, Format

MANY_ROWS = 33
"""From here on ``gemm`` reads the weights less often than a third pass over them would."""


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """Consecutive rows of a weight in one format, packed (``packing.py``)."""

    format: Format
    num_rows: int
    weights: DeviceArray


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
    return Kernel(f"linear_{format.name.lower()}_x{tokens}", unroll_into(linear, body), arguments, THREADS, MIN_BLOCKS)


def staging_words(segments: Sequence[PackedSegment], num_rows: int, in_features: int) -> int:
    """uint32 words of scratch that ``linear`` wants, 0 for few rows."""
    if num_rows < MANY_ROWS:
        return 0
    formats = {segment.format for segment in segments} - {F32}
    return max((staged_words(format, num_rows, in_features) for format in formats), default=0)


def linear(
    device: Device,
    out: DeviceArray,
    x: DeviceArray,
    segments: Sequence[PackedSegment],
    bias: DeviceArray | None = None,
    *,
    add: bool = False,
    staging: DeviceArray | None = None,
    next_weights: DeviceArray | None = None,
) -> None:
    """out [R, out_features] = x @ weight.T (+ bias), or += with ``add``. A launch (two) a segment of equal format.

    ``staging`` is scratch of ``staging_words``; without it many rows go the way of few. ``next_weights`` are those that
    L2 is asked for when these are done.
    """
    num_rows, in_features = x.shape
    first_feature = 0
    for segment in segments:
        arrays = [flat(out), flat(x), segment.weights, flat(x) if bias is None else bias]
        sizes, rest = [num_rows, in_features, segment.num_rows], [out.shape[1], first_feature, int(add)]
        if segment.format is F32:
            tokens = 1 if num_rows == 1 else 4
            grid = -(-segment.num_rows // ROWS), -(-num_rows // tokens)
            device.launch(linear_f32_kernel(tokens), grid, [*arrays, *sizes, *rest, int(bias is not None)])
        elif staging is not None and num_rows >= MANY_ROWS:
            gemm(
                device,
                out,
                x,
                staging,
                segment.format,
                segment.weights,
                segment.num_rows,
                arrays[3],
                [first_feature, int(add), int(bias is not None)],
            )
        else:
            tokens, pairs = tokens_for(num_rows), num_tiles(segment.num_rows) // 2
            kernel = linear_kernel(segment.format, tokens)
            grid = stream_grid(device, pairs, num_rows, tokens)
            ahead = ahead_of(next_weights if segment is segments[-1] else None, segment.weights, num_rows)
            device.launch(kernel, grid, [*arrays, *sizes, pairs, *rest, int(bias is not None), *ahead])
        first_feature += segment.num_rows
