"""The arithmetic that decode and prefill attention share, so that a row has the same bits in both.

A context is cut into segments of 256 tokens from position 0, and a segment into tiles of 64. For a row, within a
segment and tile by tile, as in FlashAttention-2 (Dao 2023):

    s = q kᵀ                        mma.sync over the dimensions, q in two planes of halves (high and low part)
    m' = max(m, max s)              maximum of the segment so far
    p = 2^(s - m')                  base 2: scale · log2 e is part of q
    l = l 2^(m - m') + Σ p          by lanes, summed over the four of a row at the end of the segment
    acc = acc 2^(m - m') + p v      mma.sync over the tokens, p in two planes of halves

and segment by segment (m, l, acc) is merged into what came before by log-sum-exp. Who computes it, which rows share a
tile and where the context ends changes nothing: a masked score is -inf, its p is 0, and a tile of them leaves m, l and
acc as they are.

Two planes carry 21 bits of q and p; the halves of the cache are multiplied exactly and summed in float32. Of random q,
k and v (1000 tokens, D = 128), results then differ from float64's by 1.4e-6 of their size at most; with one plane of
halves, which would save half of the products, by 1.2e-3, with one of bfloat16 by 1.2e-2.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.cuda.kernels.intrinsics import (
    divide,
    exp2,
    float_of_half,
    fma,
    half_pair,
    load_quad,
    select,
    store_quad,
)
from numba_engine.backends.cuda.kernels.reductions import FULL_WARP
from numba_engine.backends.cuda.kernels.tensor_cores import multiply_adds_f16, truncate_to_half
from numba_engine.backends.cuda.kernels.unrolling import static_range, unroll

SEGMENT = 256
"""Tokens of a segment. A constant of the arithmetic: it fixes the order of summation."""
TILE = 64
"""Tokens of a tile, likewise."""
multiply_values = multiply_adds_f16([(0, 0, 0), (4, 0, 2), (0, 4, 0), (4, 4, 2)])
"""Both planes of p, as ``split_planes`` leaves them, by the values of 16 tokens and 16 dimensions."""
MERGE_LOADS = 8
"""Segments whose parts the last block has in flight."""
LOG2_E = 1.4426950408889634
_INFINITY = float("inf")


@cuda.jit(device=True, inline="always")
@unroll
def split_planes(p, at, planes):  # type: ignore[no-untyped-def]
    """p[at : at + 8], 16 tokens as mma leaves them, as mma's A, four registers a plane: 11 upper bits, and the rest."""
    for r in static_range(4):
        a, b = p[at + 2 * r], p[at + 2 * r + 1]
        high_a, high_b = truncate_to_half(a), truncate_to_half(b)
        planes[r] = half_pair(high_a, high_b)
        planes[r + 4] = half_pair(float32(a - high_a), float32(b - high_b))


@cuda.jit(device=True, inline="always")
@unroll
def load_query(qkv, row, unit, units, scale, planes, at):  # type: ignore[no-untyped-def]
    """Dimensions 8 unit … 8 unit + 7 of the row of q that begins at ``row``, scaled, as mma's A in two planes.

    The first four are the lane's share of one product, the last four of the next, whose registers are 8 after; pairs go
    to registers 0 and 2 from ``at`` on, of row g (for row g + 8 ``at`` is one more), and the low plane's 4 after. Units
    of neighbouring lanes are neighbours, and two lanes load each other's halves, for whole 32-byte sectors.
    """
    received = cuda.local.array(4, float32)
    is_odd = uint32(unit & uint32(1)) != uint32(0)
    even_unit = uint32(unit & uint32(0xFFFFFFFE))
    place = uint32(row + even_unit * uint32(8) + (unit & uint32(1)) * uint32(4))
    a = (float32(0), float32(0), float32(0), float32(0))
    b = (float32(0), float32(0), float32(0), float32(0))
    if even_unit < uint32(units):
        a = load_quad(qkv, place)
    if uint32(even_unit + uint32(1)) < uint32(units):
        b = load_quad(qkv, uint32(place + uint32(8)))
    for i in static_range(4):
        received[i] = cuda.shfl_xor_sync(FULL_WARP, select(is_odd, a[i], b[i]), 1)
    for i in static_range(2):
        first = float32(select(is_odd, received[2 * i], a[2 * i]) * scale)
        second = float32(select(is_odd, received[2 * i + 1], a[2 * i + 1]) * scale)
        high = half_pair(first, second)
        planes[at + 2 * i] = high
        planes[at + 2 * i + 4] = half_pair(
            float32(first - float_of_half(high, 0)), float32(second - float_of_half(high, 1))
        )
        first = float32(select(is_odd, b[2 * i], received[2 * i]) * scale)
        second = float32(select(is_odd, b[2 * i + 1], received[2 * i + 1]) * scale)
        high = half_pair(first, second)
        planes[at + 2 * i + 8] = high
        planes[at + 2 * i + 12] = half_pair(
            float32(first - float_of_half(high, 0)), float32(second - float_of_half(high, 1))
        )


@cuda.jit(device=True, inline="always")
@unroll
def advance_softmax(scores, maxima, sums, weights, h):  # type: ignore[no-untyped-def]
    """Scores of a tile become p; ``weights`` says by what the values summed so far are to be multiplied.

    scores float32 [8 of 8 tokens, 2 rows, 2] as mma leaves them, maxima, sums and weights float32 [2 rows]; of row h.
    """
    maximum = maxima[h]
    for n in static_range(8):
        maximum = max(maximum, max(scores[4 * n + 2 * h], scores[4 * n + 2 * h + 1]))
    maximum = max(maximum, cuda.shfl_xor_sync(FULL_WARP, maximum, 1))
    maximum = max(maximum, cuda.shfl_xor_sync(FULL_WARP, maximum, 2))
    finite = select(maximum == float32(-_INFINITY), float32(0), maximum)
    weights[h] = exp2(float32(maxima[h] - finite))
    maxima[h] = maximum
    total = float32(0)
    for n in static_range(8):
        for i in static_range(2):
            p = exp2(float32(scores[4 * n + 2 * h + i] - finite))
            scores[4 * n + 2 * h + i] = p
            total += p
    sums[h] = fma(sums[h], weights[h], total)


@cuda.jit(device=True, inline="always")
def sum_over_lanes_of_a_row(value):  # type: ignore[no-untyped-def]
    value += cuda.shfl_xor_sync(FULL_WARP, value, 1)
    value += cuda.shfl_xor_sync(FULL_WARP, value, 2)
    return value


@cuda.jit(device=True, inline="always")
def span_of_rows(cu_seqlens_q, context_lens, sequence, first_row, num_rows, rows, group_size, window):  # type: ignore[no-untyped-def]
    """(position of the sequence's first query token, last row of the tile, begin, end) of the tile at ``first_row``.

    Its rows see, causal and windowed, no tokens but those at begin … end - 1.
    """
    num_queries = uint32(uint32(cu_seqlens_q[sequence + 1]) - uint32(cu_seqlens_q[sequence]))
    first_position = uint32(uint32(context_lens[sequence]) - num_queries)
    last_row = min(uint32(first_row + uint32(rows - 1)), uint32(num_rows - uint32(1)))
    end = uint32(first_position + last_row // group_size + uint32(1))
    earliest = uint32(first_position + first_row // group_size + uint32(1))
    begin = uint32(earliest - window) if earliest > window else uint32(0)
    return first_position, last_row, begin, end


def merger(head_dim: int, rows: int, threads: int) -> Any:
    """A function of a block of ``threads`` that merges the parts of up to ``rows`` rows into out."""
    row_quads = head_dim // 4
    quads = -(-rows * row_quads // threads)  # of the result that a thread owns
    num_values = 4 * MERGE_LOADS

    @cuda.jit(device=True, inline="always")
    @unroll
    def merge(  # type: ignore[no-untyped-def]
        out,
        partials,
        stats,
        parts,
        split_rows,
        first_segment,
        last_segment,
        first_row,
        last_row,
        first_token,
        num_heads,
        group_size,
        kv_head,
    ):
        """In the order of the segments; part s of row r is at (parts + s) * split_rows + r."""
        maxima = cuda.local.array(MERGE_LOADS, float32)
        sums = cuda.local.array(MERGE_LOADS, float32)
        values = cuda.local.array(num_values, float32)
        merged = cuda.local.array(4, float32)
        for m in static_range(quads):
            quad_index = uint32(uint32(cuda.threadIdx.x) + uint32(m * threads))
            r = uint32(quad_index // uint32(row_quads))
            n = uint32(quad_index - r * uint32(row_quads))
            row = min(uint32(first_row + r), last_row)
            maximum, total = float32(-_INFINITY), float32(0)
            merged[0] = merged[1] = merged[2] = merged[3] = float32(0)
            segment = first_segment
            while segment <= last_segment:
                for u in range(MERGE_LOADS):
                    part = uint32(parts + min(uint32(segment + uint32(u)), last_segment))
                    place = uint32(part * split_rows + row)
                    maxima[u] = stats[uint32(place * uint32(2))]
                    sums[u] = stats[uint32(place * uint32(2) + uint32(1))]
                    quad = load_quad(partials, uint32(place * uint32(head_dim) + n * uint32(4)))
                    for i in range(4):
                        values[4 * u + i] = quad[i]
                for u in range(MERGE_LOADS):
                    if uint32(segment + uint32(u)) <= last_segment and sums[u] > float32(0):
                        new_maximum = max(maximum, maxima[u])
                        old_weight = exp2(float32(maximum - new_maximum))
                        new_weight = exp2(float32(maxima[u] - new_maximum))
                        maximum = new_maximum
                        total = fma(sums[u], new_weight, float32(total * old_weight))
                        for i in range(4):
                            merged[i] = fma(values[4 * u + i], new_weight, float32(merged[i] * old_weight))
                segment = uint32(segment + uint32(MERGE_LOADS))
            if uint32(first_row + r) <= last_row and r < uint32(rows):
                token = uint32(row // group_size)
                head = uint32(kv_head * group_size + (row - token * group_size))
                place = uint32((first_token + token) * num_heads + head)
                quad = (
                    divide(merged[0], total),
                    divide(merged[1], total),
                    divide(merged[2], total),
                    divide(merged[3], total),
                )
                store_quad(out, uint32(place * uint32(head_dim) + n * uint32(4)), quad)

    return merge


def key_multiplier(columns: int, stride: int) -> Any:
    """Both planes of 32 dimensions of q by ``columns`` × 8 keys, the four words of each ``stride`` after the last's."""
    return multiply_adds_f16(
        [(4 * u, 8 * s + 4 * plane, stride * u + 2 * s) for s in range(2) for plane in range(2) for u in range(columns)]
    )
