"""int8_planes: x in two planes of int8, for weights of codes and scales (``planes.py``, ``codes.py``).

As on the CPU: q = round(x / d_x) = 256 high + low in int8, d_x = max|x| / 32512 of each 32 columns. The product of 32
columns is an exact integer (of 16, by the smaller instruction, where runs of 16 have scales of their own);
sum = fma(d s d_x, 256 high + low, sum), and with minima fma(m, d_x Σ q, sum).
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from numba_engine.backends.cuda.kernels.codes import bytes_of, fine_of, part_of, scale_of_bytes, word_of
from numba_engine.backends.cuda.kernels.intrinsics import (
    address_of,
    as_bits,
    as_float,
    float_of_half,
    fma,
    load_quad,
    load_weight_at,
    load_weight_pair_at,
    load_weights_at,
    mma_s8,
    mma_s8_16,
    multiply,
    permute,
    reciprocal,
    round_to_int,
    store_pair,
)
from numba_engine.backends.cuda.kernels.packing import Layout, layout_of
from numba_engine.backends.cuda.kernels.planes import COLUMNS_STAGED, Planes
from numba_engine.backends.cuda.kernels.reductions import FULL_WARP
from numba_engine.backends.cuda.kernels.unrolling import static_range, unroll
from numba_engine.formats import Codes, Format


def int8_planes(format: Format, tokens: int, read: Any) -> Planes:
    assert format.codes
    codes, layout, has_minima = format.codes, layout_of(format), format.minima is not None
    groups = max(tokens // 4, 1)
    chunk = max(COLUMNS_STAGED // tokens, 2048 // max(tokens, 8))
    quads = chunk // 4
    log2_quads = quads.bit_length() - 1
    parts = tokens * quads // 128
    chunk_steps, step_stride = chunk // 64, 32 * tokens
    lane_mask, token_mask = (31, 3) if tokens > 1 else (7, 0)
    scales_at = chunk_steps * step_stride
    coarse_at, coarse_words, fine_words = sum(layout.planes), layout.coarse_words, layout.fine_words
    fine_at = coarse_at + coarse_words
    tile_words = fine_at + fine_words
    coarse_stride = coarse_words // 2 if format.block_size == 32 else 0
    has_fine, has_fine_minima = layout.fine_words > 0, bool(format.minima and format.minima.fine)
    is_split = layout.run == 16
    inverse_of_most = 1 / 32512
    x_factor = scale_of_bytes(codes)
    quad_of, fine = _quad_of(codes, layout), fine_of(format)
    places, load = _loads(layout, tile_words)

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
                    t, i_of_t = uint32(eighth >> uint32(1)), uint32(eighth & uint32(1))
                    if is_split:  # each run of 16 columns is one word of four lanes
                        t, i_of_t = uint32(eighth & uint32(3)), uint32(eighth >> uint32(2))
                    own = uint32(t * uint32(4) + block * uint32(2) + i_of_t)
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
                    w = at + tile_words * tile
                    a0, a1 = quad_of(words, w, block, 0, 0), quad_of(words, w, block, 0, 1)
                    a2, a3 = quad_of(words, w, block, 1, 0), quad_of(words, w, block, 1, 1)
                    nothing = (zero, zero, zero, zero)
                    if is_split:
                        c = mma_s8_16((a0, a1), (b[2 * block],), nothing)
                        second = mma_s8_16((a2, a3), (b[2 * block + 1],), nothing)
                    else:
                        c = mma_s8((a0, a1, a2, a3), (b[2 * block], b[2 * block + 1]), nothing)
                    for half in range(2):
                        s = 2 * (groups * tile + group) + half
                        coarse = w + coarse_at + coarse_stride * block
                        dot = float32(int32(int32(c[2 * half] << int32(8)) + c[2 * half + 1]))
                        d = float_of_half(words[coarse], half)
                        run_d = multiply(d, fine(words, w + fine_at, 0, block, 0, half)) if has_fine else d
                        sums[s] = fma(multiply(run_d, scales[2 * block]), dot, sums[s])
                        if is_split:
                            dot = float32(int32(int32(second[2 * half] << int32(8)) + second[2 * half + 1]))
                            run_d = multiply(d, fine(words, w + fine_at, 0, block, 1, half))
                            sums[s] = fma(multiply(run_d, scales[2 * block]), dot, sums[s])
                        if has_minima:
                            m = float_of_half(words[coarse + 1], half)
                            if has_fine_minima:
                                m = multiply(m, fine(words, w + fine_at, 1, block, 0, half))
                            sums[s] = fma(m, scales[2 * block + 1], sums[s])

    @cuda.jit(device=True, forceinline=True)
    def total(sums, tile, group, half, memory, base, token):  # type: ignore[no-untyped-def]
        return sums[2 * (groups * tile + group) + half]

    return Planes(
        step=64,
        chunk_steps=chunk_steps,
        step_words=layout.unit_words,
        tile_words=tile_words,
        num_sums=4 * groups,
        staged_words=scales_at + 4 * tokens * chunk_steps,
        places=places,
        load=load,
        prepare=prepare,
        stage=stage,
        multiply=multiply_step,
        total=total,
    )


def _quad_of(codes: Codes, layout: Layout) -> Any:
    """Four codes as signed bytes, from a lane's words of a unit: quad(words, at, group, i, h)."""
    first, *others = layout.planes
    second = others[0] if others else 0
    word_of_first, part_of_first = word_of(first), part_of(first, 0)
    word_of_second, part_of_second = word_of(second or first), part_of(second or first, first)
    as_bytes = bytes_of(codes)

    @cuda.jit(device=True, forceinline=True)
    def quad(words, at, group, i, h):  # type: ignore[no-untyped-def]
        code = part_of_first(words[uint32(uint32(at) + word_of_first(group, i, h))], group, i, h)
        if second:
            word = words[uint32(uint32(at + first) + word_of_second(group, i, h))]
            code = uint32(code | part_of_second(word, group, i, h))
        return as_bytes(code)

    return quad


def _loads(layout: Layout, tile_words: int) -> Any:
    """``places`` and ``load`` of ``Planes``: the planes of the codes, then coarse and fine scales."""
    first, *others = layout.planes
    second, coarse, fine = others[0] if others else 0, layout.coarse_words, layout.fine_words
    unit_words, coarse_at = layout.unit_words, layout.weight_words
    second_at, fine_at = 16 * 64 // 32 * first, coarse_at + 8 * coarse
    per_lane, num_loads = min(first, 4), max(first // 4, 1)
    load_first, load_second, load_coarse, load_fine = (_copy(n) for n in (per_lane, second or 1, coarse, fine or 1))

    @cuda.jit(device=True, forceinline=True)
    def places(weights, unit, lane):  # type: ignore[no-untyped-def]
        start, g = uint32(unit * uint32(unit_words)), uint32(lane >> uint32(2))
        to_first = address_of(weights, uint32(start + lane * uint32(per_lane)))
        to_coarse = address_of(weights, uint32(start + uint32(coarse_at) + g * uint32(coarse)))
        to_second = to_fine = to_coarse
        if second:
            to_second = address_of(weights, uint32(start + uint32(second_at) + lane * uint32(second)))
        if fine:
            to_fine = address_of(weights, uint32(start + uint32(fine_at) + g * uint32(fine)))
        return to_first, to_second, to_coarse, to_fine

    @cuda.jit(device=True, forceinline=True)
    def load(words, at, tile, places, skip):  # type: ignore[no-untyped-def]
        w = at + tile_words * tile
        for i in range(num_loads):
            load_first(words, w + 4 * i, places[0] + skip + uint64(512 * i))
        if second:
            load_second(words, w + first, places[1] + skip)
        load_coarse(words, w + first + second, places[2] + skip)
        if fine:
            load_fine(words, w + first + second + coarse, places[3] + skip)

    return places, load


def _copy(count: int) -> Any:
    """So many words of global memory to a lane's."""
    load = {1: load_weight_at, 2: load_weight_pair_at, 4: load_weights_at}[count]

    @cuda.jit(device=True, forceinline=True)
    def copy(words, at, address):  # type: ignore[no-untyped-def]
        loaded = load(address)
        for w in range(count):
            words[at + w] = loaded[w]

    return copy


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
