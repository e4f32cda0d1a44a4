"""linear_f32: out = x @ weight.T (+ bias) (+ out) of float32 weights, which no tensor core multiplies exactly.

Arrays (flat): out float32 [num_rows, out_stride]; x float32 [num_rows, in_features], in_features a multiple of 4;
weights uint32, float32 bits [out_features, in_features]; bias float32 [out_stride] (read if has_bias).

A warp an output, for up to 4 rows of x at once: lanes take neighbouring quads of the row, 4 loads ahead of their use,
and meet in a butterfly. Simple rather than fast: models are stored in 16 bits or fewer. Bytes moved: the weight once
per 4 rows of x, x once a warp (from L1 and L2), out once.
"""

from __future__ import annotations

from functools import cache

from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.intrinsics import as_float, fma, load_quad, load_weights
from numba_engine.backends.cuda.kernels.reductions import sum_warp

THREADS = 256
ROWS = THREADS // 32


@cache
def linear_f32_kernel(tokens: int) -> Kernel:
    """The kernel that serves ``tokens`` (1 or 4) rows of x a pass."""

    def linear_f32(  # type: ignore[no-untyped-def]
        out, x, weights, bias, num_rows, in_features, out_features, out_stride, out_offset, add, has_bias
    ):
        sums = cuda.local.array(tokens, float32)
        words = cuda.local.array(16, uint32)
        lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
        column = uint32(uint32(cuda.blockIdx.x) * uint32(ROWS) + uint32(uint32(cuda.threadIdx.x) >> uint32(5)))
        first_row = uint32(uint32(cuda.blockIdx.y) * uint32(tokens))
        if column >= out_features:
            return
        for t in range(tokens):
            sums[t] = float32(0)
        place = uint32(lane * uint32(4))
        while place < in_features:
            for i in range(4):
                if uint32(place + uint32(128 * i)) < in_features:
                    quad = load_weights(weights, uint32(column * in_features + place + uint32(128 * i)))
                    for w in range(4):
                        words[4 * i + w] = quad[w]
            for i in range(4):
                at = uint32(place + uint32(128 * i))
                if at < in_features:
                    for t in range(tokens):
                        if uint32(first_row + uint32(t)) < num_rows:
                            values = load_quad(x, uint32(uint32(first_row + uint32(t)) * in_features + at))
                            for w in range(4):
                                sums[t] = fma(as_float(words[4 * i + w]), values[w], sums[t])
            place = uint32(place + uint32(512))
        for t in range(tokens):
            value = sum_warp(sums[t])
            row = uint32(first_row + uint32(t))
            if lane == uint32(0) and row < num_rows:
                to = uint32(row * out_stride + out_offset + column)
                if has_bias != uint32(0):
                    value += bias[uint32(out_offset + column)]
                if add != uint32(0):
                    value += out[to]
                out[to] = value

    arguments = (float32[::1], float32[::1], uint32[::1], float32[::1], *[uint32] * 7)
    return Kernel(f"linear_f32_x{tokens}", linear_f32, arguments, THREADS)
