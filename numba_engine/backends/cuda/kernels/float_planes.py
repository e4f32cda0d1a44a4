"""float_planes: x in two planes of the weights' own type, for BF16 and F16 (``planes.py``).

high = x rounded to the weight's type, low = the rest, rounded: 16 (BF16) or 22 bits of x, in float32 sums. Halves reach
from 2^-24 to 65504 only, so for F16 weights x is scaled by a power of two that takes the largest of the warp's columns
to 2^14, and the sum is scaled back.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from numba_engine.backends.cuda.kernels.intrinsics import (
    address_of,
    as_bits,
    as_float,
    bf16_pair,
    float_of_half,
    half_pair,
    load_quad,
    load_weights_at,
    mma_bf16,
    mma_f16,
    multiply,
    store_pair,
)
from numba_engine.backends.cuda.kernels.packing import layout_of
from numba_engine.backends.cuda.kernels.planes import COLUMNS_STAGED, Planes
from numba_engine.backends.cuda.kernels.reductions import FULL_WARP
from numba_engine.backends.cuda.kernels.unrolling import static_range, unroll
from numba_engine.formats import F16, Format


def float_planes(format: Format, tokens: int, read: Any) -> Planes:
    is_half = format is F16
    mma, pair = (mma_f16, half_pair) if is_half else (mma_bf16, bf16_pair)
    widen = float_of_half if is_half else _float_of_bf16
    groups = max(tokens // 4, 1)
    chunk = COLUMNS_STAGED // tokens
    quads = chunk // 4
    log2_quads = quads.bit_length() - 1
    step_stride = 32 * tokens
    lane_mask = 31 if tokens > 1 else 7
    scales_at = COLUMNS_STAGED
    unit_words = layout_of(format).unit_words

    @cuda.jit(device=True, forceinline=True)
    def places(weights, unit, lane):  # type: ignore[no-untyped-def]
        return (address_of(weights, uint32(unit * uint32(unit_words) + lane * uint32(4))),)

    @cuda.jit(device=True, forceinline=True)
    def load(words, at, tile, places, skip):  # type: ignore[no-untyped-def]
        for i in range(2):
            quad = load_weights_at(places[0] + skip + uint64(512 * i))
            for w in range(4):
                words[at + 8 * tile + 4 * i + w] = quad[w]

    @cuda.jit(device=True, forceinline=True)
    def prepare(memory, base, x, source, first_row, num_rows, first_column, end_column, lane):  # type: ignore[no-untyped-def]
        """For F16: the power of two that x is scaled by, of each token."""
        if is_half:
            for token in range(tokens):
                largest = int32(0)
                column = uint32(first_column + lane * uint32(4))
                while column < end_column:
                    quad = read(memory, x, source, uint32(token), first_row, num_rows, column)
                    for i in range(4):
                        largest = max(largest, int32(as_bits(quad[i]) & uint32(0x7FFFFFFF)))
                    column = uint32(column + uint32(128))
                for i in range(5):
                    largest = max(largest, cuda.shfl_xor_sync(FULL_WARP, largest, 16 >> i))
                exponent = max(uint32(uint32(largest) >> uint32(23)), uint32(15))
                if lane == uint32(0):
                    memory[uint32(base + uint32(scales_at + token))] = uint32(uint32(268 - exponent) << uint32(23))
            cuda.syncwarp()

    @cuda.jit(device=True, forceinline=True)
    def stage(memory, base, x, source, first_row, num_rows, first_column, end_column, steps, lane):  # type: ignore[no-untyped-def]
        values = cuda.local.array(16, float32)
        needed = uint32(steps * uint32(8))
        for part in range(2):
            for i in range(4):
                index = uint32(uint32(128 * part + 32 * i) + lane)
                quad = (float32(0), float32(0), float32(0), float32(0))
                column = uint32(first_column + uint32(index & uint32(quads - 1)) * uint32(4))
                if column < end_column:
                    quad = read(memory, x, source, uint32(index >> uint32(log2_quads)), first_row, num_rows, column)
                for w in range(4):
                    values[4 * i + w] = quad[w]
            for i in range(4):
                if uint32((128 * part + 32 * i) & (quads - 1)) < needed:
                    index = uint32(uint32(128 * part + 32 * i) + lane)
                    token = uint32(index >> uint32(log2_quads))
                    place = uint32(index & uint32(quads - 1))
                    v0, v1, v2, v3 = values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]
                    if is_half:
                        scale = as_float(memory[uint32(base + uint32(scales_at) + token)])
                        v0, v1, v2, v3 = (
                            multiply(v0, scale),
                            multiply(v1, scale),
                            multiply(v2, scale),
                            multiply(v3, scale),
                        )
                    high01, high23 = pair(v0, v1), pair(v2, v3)
                    low01 = pair(v0 - widen(high01, 0), v1 - widen(high01, 1))
                    low23 = pair(v2 - widen(high23, 0), v3 - widen(high23, 1))
                    step = uint32(place >> uint32(3))
                    parity = uint32(uint32(step & uint32(1)) * uint32(16))
                    own = uint32(uint32(place & uint32(7)) * uint32(2))
                    to = uint32(base + step * uint32(step_stride) + token * uint32(32) + own)
                    store_pair(memory, uint32(to + parity), (high01, high23))
                    store_pair(memory, uint32(to + (parity ^ uint32(16))), (low01, low23))

    @cuda.jit(device=True, forceinline=True)
    @unroll
    def multiply_step(sums, words, at, memory, base, step, parity, lane):  # type: ignore[no-untyped-def]
        own = uint32(base + step * uint32(step_stride) + ((lane ^ uint32(4 * parity)) & uint32(lane_mask)) * uint32(4))
        for group in static_range(groups):
            quad = load_quad(memory, uint32(own + uint32(128 * group)))
            for tile in static_range(2):
                s = 4 * (groups * tile + group)
                w = at + 8 * tile
                c = (sums[s], sums[s + 1], sums[s + 2], sums[s + 3])
                c = mma((words[w], words[w + 1], words[w + 2], words[w + 3]), (quad[0], quad[1]), c)
                c = mma((words[w + 4], words[w + 5], words[w + 6], words[w + 7]), (quad[2], quad[3]), c)
                sums[s], sums[s + 1], sums[s + 2], sums[s + 3] = c

    @cuda.jit(device=True, forceinline=True)
    def total(sums, tile, group, half, memory, base, token):  # type: ignore[no-untyped-def]
        s = 4 * (groups * tile + group) + 2 * half
        value = float32(sums[s] + sums[s + 1])
        if is_half:
            scale = memory[uint32(base + uint32(scales_at) + token)]
            value = multiply(value, as_float(uint32(uint32(0x7F000000) - scale)))
        return value

    return Planes(
        step=32,
        chunk_steps=chunk // 32,
        step_words=unit_words // 2,
        tile_words=8,
        num_sums=8 * groups,
        staged_words=COLUMNS_STAGED + (max(tokens, 4) if is_half else 0),
        places=places,
        load=load,
        prepare=prepare,
        stage=stage,
        multiply=multiply_step,
        total=total,
    )


@cuda.jit(device=True, forceinline=True)
def _float_of_bf16(word, i):  # type: ignore[no-untyped-def]
    return as_float(uint32(word & uint32(0xFFFF0000)) if i else uint32(word << uint32(16)))
