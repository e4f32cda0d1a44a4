"""planes: what differs between the weight formats in the loop of ``streaming``: loads, the staging of x, products.

A tensor core multiplies 16 rows of the weight (A) with 8 columns (B), and x has more digits than the 8 or 11 bits of
its operands. So x is split into two *planes*, x = high + low, and the 8 columns are the planes of 4 tokens, side by
side: column 2c is token c's high, column 2c + 1 its low. One instruction makes both products, and the lane that holds
an output's high sum holds its low sum too.

BF16, F16   high = x rounded to the weight's type, low = the rest, rounded: 16 (BF16) or 22 bits of x, in float32 sums.
            Halves reach from 2^-24 to 65504 only, so for F16 weights x is scaled by a power of two that takes the
            largest of the warp's columns to 2^14, and the sum is scaled back.
Q8_0, Q4_0, Q4_1   as the CPU backend: q = round(x / d_x) = 256 high + low in int8, d_x = max|x| / 32512 of each 32
            columns. A block's product is an exact integer; sum = fma(d, d_x (256 high + low), sum), and for Q4_1
            fma(m, d_x Σ q, sum). A nibble becomes a byte by a mask (Q4_0: in the byte's upper half, so 16 times too
            much and with its sign; d_x is a sixteenth for it).

Shared memory of a warp: [step][4-token group][column ^ step parity][t < 4][words], which are the bytes of B that lane
4 g + t needs (g the column), 16 a lane, 512 together: no bank is asked twice. The parity flips neighbouring columns in
odd steps, because lanes that store the same plane of two steps at once would collide otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from numba_engine.backends.cuda.kernels.intrinsics import (
    as_bits,
    as_float,
    bf16_pair,
    float_of_half,
    fma,
    half_pair,
    load_quad,
    load_weight_pair_at,
    load_weights_at,
    mma_bf16,
    mma_f16,
    mma_s8,
    multiply,
    permute,
    reciprocal,
    round_to_int,
    store_pair,
)
from numba_engine.backends.cuda.kernels.packing import LAYOUTS
from numba_engine.backends.cuda.kernels.reductions import FULL_WARP
from numba_engine.backends.cuda.kernels.unrolling import static_range, unroll
from numba_engine.formats import F16, Q4_0, Q4_1, Q8_0, Format

WARPS = 8
COLUMNS_STAGED = 1024
"""Columns × tokens that a warp stages at a time."""


@dataclass(frozen=True, slots=True)
class Planes:
    """Of one format and a number of tokens. The functions are inlined into the kernel."""

    step: int
    """Columns a warp takes at a time."""
    chunk_steps: int
    """Steps of x staged at a time."""
    step_words: int
    """Words of a tile's step in memory."""
    tile_words: int
    """Words of a tile's step in a lane's registers."""
    num_sums: int
    """float32 accumulators of a lane: [tile 2][4-token group][…]."""
    staged_words: int
    """Words of shared memory a warp stages x in."""
    load: Callable[..., None]
    prepare: Callable[..., None]
    stage: Callable[..., None]
    multiply: Callable[..., None]
    total: Callable[..., Any]


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

    @cuda.jit(device=True, forceinline=True)
    def load(words, at, tile, weights, scales):  # type: ignore[no-untyped-def]
        for i in range(2):
            quad = load_weights_at(weights + uint64(512 * i))
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
        step_words=LAYOUTS[format].unit_words // 2,
        tile_words=8,
        num_sums=8 * groups,
        staged_words=COLUMNS_STAGED + (max(tokens, 4) if is_half else 0),
        load=load,
        prepare=prepare,
        stage=stage,
        multiply=multiply_step,
        total=total,
    )


@cuda.jit(device=True, forceinline=True)
def _float_of_bf16(word, i):  # type: ignore[no-untyped-def]
    return as_float(uint32(word & uint32(0xFFFF0000)) if i else uint32(word << uint32(16)))


def int8_planes(format: Format, tokens: int, read: Any) -> Planes:
    is_q8, is_q4_0, has_minima = (format is other for other in (Q8_0, Q4_0, Q4_1))
    groups = max(tokens // 4, 1)
    chunk = max(COLUMNS_STAGED // tokens, 2048 // max(tokens, 8))
    quads = chunk // 4
    log2_quads = quads.bit_length() - 1
    parts = tokens * quads // 128
    chunk_steps, step_stride = chunk // 64, 32 * tokens
    lane_mask, token_mask = (31, 3) if tokens > 1 else (7, 0)
    scales_at = chunk_steps * step_stride
    weight_loads, scale_words = LAYOUTS[format].weight_words // 128, LAYOUTS[format].scale_words // 8
    scale_at = 4 * weight_loads
    tile_words = scale_at + scale_words
    words_per_block, d_stride = 2 * weight_loads, scale_words // 2
    inverse_of_most = 1 / 32512
    x_factor = 0.0625 if is_q4_0 else 1.0
    mask = 0xF0F0F0F0 if is_q4_0 else 0x0F0F0F0F
    up, down = (4, 0) if is_q4_0 else (0, 4)  # shifts that take low and high nibbles to their places

    @cuda.jit(device=True, forceinline=True)
    def load(words, at, tile, weights, scales):  # type: ignore[no-untyped-def]
        for i in range(weight_loads):
            quad = load_weights_at(weights + uint64(512 * i))
            for w in range(4):
                words[at + tile_words * tile + 4 * i + w] = quad[w]
        if has_minima:
            quad = load_weights_at(scales)
            for w in range(4):
                words[at + tile_words * tile + scale_at + w] = quad[w]
        else:
            two = load_weight_pair_at(scales)
            for w in range(2):
                words[at + tile_words * tile + scale_at + w] = two[w]

    @cuda.jit(device=True, forceinline=True)
    def prepare(memory, base, x, source, first_row, num_rows, first_column, end_column, lane):  # type: ignore[no-untyped-def]
        pass

    @cuda.jit(device=True, forceinline=True)
    def stage(memory, base, x, source, first_row, num_rows, first_column, end_column, steps, lane):  # type: ignore[no-untyped-def]
        values = cuda.local.array(16, float32)
        needed = uint32(steps * uint32(16))
        for part in range(parts):
            for i in range(4):
                index = uint32(uint32(128) * uint32(part) + uint32(32 * i) + lane)
                quad = (float32(0), float32(0), float32(0), float32(0))
                column = uint32(first_column + uint32(index & uint32(quads - 1)) * uint32(4))
                if column < end_column:
                    quad = read(memory, x, source, uint32(index >> uint32(log2_quads)), first_row, num_rows, column)
                for w in range(4):
                    values[4 * i + w] = quad[w]
            for i in range(4):
                first = uint32(uint32(128) * uint32(part) + uint32(32 * i))
                if uint32(first & uint32(quads - 1)) < needed:
                    index = uint32(first + lane)
                    token = uint32(index >> uint32(log2_quads))
                    place = uint32(index & uint32(quads - 1))
                    largest = int32(0)
                    for w in range(4):
                        largest = max(largest, int32(as_bits(values[4 * i + w]) & uint32(0x7FFFFFFF)))
                    for w in range(3):
                        largest = max(largest, cuda.shfl_xor_sync(FULL_WARP, largest, 4 >> w))
                    inverse = _most_over(as_float(uint32(largest)))
                    if not inverse <= float32(3e38):  # blocks too small to scale are taken as zero
                        inverse = float32(0)
                    q0 = round_to_int(multiply(values[4 * i], inverse))
                    q1 = round_to_int(multiply(values[4 * i + 1], inverse))
                    q2 = round_to_int(multiply(values[4 * i + 2], inverse))
                    q3 = round_to_int(multiply(values[4 * i + 3], inverse))
                    low = _bytes(q0, q1, q2, q3, uint32(0x0040))
                    round_up = int32(128)  # the low byte is signed
                    high = _bytes(q0 + round_up, q1 + round_up, q2 + round_up, q3 + round_up, uint32(0x0051))
                    step, block = uint32(place >> uint32(4)), uint32(uint32(place >> uint32(3)) & uint32(1))
                    eighth = uint32(place & uint32(7))
                    own = uint32(uint32(eighth >> uint32(1)) * uint32(4) + block * uint32(2) + (eighth & uint32(1)))
                    parity = uint32(uint32(step & uint32(1)) * uint32(16))
                    to = uint32(base + step * uint32(step_stride) + token * uint32(32) + own)
                    memory[uint32(to + parity)] = high
                    memory[uint32(to + (parity ^ uint32(16)))] = low
                    scale, total_q = multiply(as_float(uint32(largest)), float32(inverse_of_most)), int32(0)
                    if has_minima:
                        total_q = int32(int32(q0 + q1) + int32(q2 + q3))
                        for w in range(3):
                            total_q = int32(total_q + cuda.shfl_xor_sync(FULL_WARP, total_q, 4 >> w))
                    if eighth == uint32(0):
                        to = uint32(uint32(step * uint32(tokens) + token) * uint32(4) + block * uint32(2))
                        pair = as_bits(multiply(scale, float32(x_factor))), as_bits(multiply(scale, float32(total_q)))
                        store_pair(memory, uint32(base + uint32(scales_at) + to), pair)

    @cuda.jit(device=True, forceinline=True)
    @unroll
    def multiply_step(sums, words, at, memory, base, step, parity, lane):  # type: ignore[no-untyped-def]
        own = uint32(base + step * uint32(step_stride) + ((lane ^ uint32(4 * parity)) & uint32(lane_mask)) * uint32(4))
        token = uint32(lane & uint32(token_mask))
        scales_own = uint32(base + uint32(scales_at) + uint32(step * uint32(tokens) + token) * uint32(4))
        zero = int32(0)
        b = cuda.local.array(4, uint32)
        scales = cuda.local.array(4, float32)
        for group in static_range(groups):
            quad, x_scales = (
                load_quad(memory, uint32(own + uint32(128 * group))),
                load_quad(memory, uint32(scales_own + uint32(16 * group))),
            )
            for i in range(4):
                b[i], scales[i] = quad[i], as_float(x_scales[i])
            for tile in range(2):
                for block in range(2):
                    w = at + tile_words * tile + words_per_block * block
                    if is_q8:
                        a = (words[w], words[w + 1], words[w + 2], words[w + 3])
                    else:
                        a = (
                            uint32(uint32(words[w] << uint32(up)) & uint32(mask)),
                            uint32(uint32(words[w + 1] << uint32(up)) & uint32(mask)),
                            uint32(uint32(words[w] >> uint32(down)) & uint32(mask)),
                            uint32(uint32(words[w + 1] >> uint32(down)) & uint32(mask)),
                        )
                    c = mma_s8(a, (b[2 * block], b[2 * block + 1]), (zero, zero, zero, zero))
                    w = at + tile_words * tile + scale_at + d_stride * block
                    for half in range(2):
                        s = 2 * (groups * tile + group) + half
                        dot = float32(int32(int32(c[2 * half] << int32(8)) + c[2 * half + 1]))
                        sums[s] = fma(multiply(float_of_half(words[w], half), scales[2 * block]), dot, sums[s])
                        if has_minima:
                            sums[s] = fma(float_of_half(words[w + 1], half), scales[2 * block + 1], sums[s])

    @cuda.jit(device=True, forceinline=True)
    def total(sums, tile, group, half, memory, base, token):  # type: ignore[no-untyped-def]
        return sums[2 * (groups * tile + group) + half]

    return Planes(
        step=64,
        chunk_steps=chunk_steps,
        step_words=LAYOUTS[format].unit_words,
        tile_words=tile_words,
        num_sums=4 * groups,
        staged_words=scales_at + 4 * tokens * chunk_steps,
        load=load,
        prepare=prepare,
        stage=stage,
        multiply=multiply_step,
        total=total,
    )


@cuda.jit(device=True, forceinline=True)
def _most_over(value):  # type: ignore[no-untyped-def]
    """32512 / value, rounded as a division is, without the division's branches; NaN for 0 and infinity."""
    inverse = reciprocal(value)
    inverse = fma(fma(-value, inverse, float32(1)), inverse, inverse)
    quotient = multiply(inverse, float32(32512))
    return fma(fma(-value, quotient, float32(32512)), inverse, quotient)


@cuda.jit(device=True, forceinline=True)
def _bytes(q0, q1, q2, q3, selector):  # type: ignore[no-untyped-def]
    """A byte of each, in a word; the selector takes that byte of two."""
    low = permute(uint32(q0), uint32(q1), selector)
    return permute(low, permute(uint32(q2), uint32(q3), selector), uint32(0x5410))
