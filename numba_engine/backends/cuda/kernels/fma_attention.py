"""attention by float32 multiply-adds: out = softmax(q kᵀ scale) v over the paged cache.

For what tensor cores do not take: a cache of float32, and heads of more than 128 dimensions.

Online softmax after Milakov & Gimelshein 2018 and Dao et al. 2022 ("FlashAttention"); the split over the context after
"Flash-Decoding" (Dao et al. 2023); the paged cache after Kwon et al. 2023.

Arrays (flat)
    out           float32 [num_tokens, H D]
    qkv           float32 [num_tokens, (H + 2 KV) D], only q is read
    k, v          the cache [B, KV, block_size, D] as uint32 words: one float32 or two halves each
    cu_seqlens_q  int32 [S + 1], context_lens int32 [S], block_tables int32 [S, max_blocks]
    partials      float32 [S, KV, num_splits, split_rows, D] and stats float32 [S, KV, num_splits, split_rows, 2]
    arrivals      uint32 [S, KV, split_rows / 8], zero before and after

A block of 128 threads serves one KV head of one sequence and 8 *rows*: (query token, query head) pairs of that KV head.
In decode those are all the query heads that share it, so keys and values are read once; in prefill, the heads of
several tokens.

The context is taken in *segments* of 256 tokens, counted from position 0:
  1. scores: 8 to 32 lanes take a token, 16 bytes of its key each (4 loads in flight), multiply with the rows' q, in
     registers (brought there anew for each segment, so that the values can have them later), and sum over the lanes;
  2. softmax of the segment's scores, in base 2 (scale · log2 e is part of q): maximum, exponentials, sum;
  3. values: the same lanes take the same tokens, 16 bytes of value each, and sum p · v in registers; then over the
     warps through shared memory.
A segment's (maximum, sum, weighted values) is merged into what came before by log-sum-exp.

A block walks all segments its rows see. Where a sequence has few rows (decode) and contexts exceed a segment, each
segment is a block of its own instead, which writes its part and counts itself in; the one that comes last merges the
parts, in the order of the segments by the same arithmetic. So a row's result is the same bits in prefill, decode and
any batch, whatever the order in which blocks arrive, and segments that a row does not see change nothing. Which of the
two it is goes by sequence: one that decodes beside another's prefill is split as well. Blocks of a grid larger than the
context needs leave at once and are not waited for.

Shared memory: scores and probabilities [256 tokens, 8 rows], so that a token's 8 probabilities are two 128-bit
broadcasts; the 4 warps' values [4, 8 rows, D], quad n of a row stored at n ^ (n / 8 % 2) against bank conflicts; the
segment's part of the block table.

Bytes moved: keys and values of every token seen once per 8 rows; q and out once.
"""

from __future__ import annotations

from functools import cache

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.arrivals import is_last_to_arrive
from numba_engine.backends.cuda.kernels.attention_tiles import LOG2_E, SEGMENT, merger, span_of_rows
from numba_engine.backends.cuda.kernels.intrinsics import (
    divide,
    exp2,
    float_of,
    float_of_half,
    fma,
    load_quad,
    select,
    store_quad,
)
from numba_engine.backends.cuda.kernels.reductions import FULL_WARP
from numba_engine.backends.cuda.kernels.soft_cap import name_with, score_capper

THREADS = 128
WARPS = THREADS // 32
ROWS = 8
LOADS = 4
"""Keys (values) a lane has in flight."""


@cache
def fma_attention_kernel(head_dim: int, is_half: bool, softcap: float | None = None) -> Kernel:
    to_float = float_of_half if is_half else float_of
    values_per_word = 2 if is_half else 1
    dims = 4 * values_per_word  # of one 16-byte load
    lanes = max(ROWS, min(32, 1 << (head_dim // dims - 1).bit_length()))  # that share a token
    chunks = -(-head_dim // (lanes * dims))  # 16-byte loads a lane takes of a token
    lane_dims = chunks * dims
    words_per_token = head_dim // values_per_word
    tokens = 32 // lanes  # of a warp at a time
    stride = WARPS * tokens * LOADS
    row_quads = head_dim // 4
    quads = -(-ROWS * row_quads // THREADS)  # of the result that a thread owns
    num_q, num_words, num_own = ROWS * lane_dims, 4 * LOADS * chunks, 4 * quads
    num_scores, num_values = SEGMENT * ROWS, WARPS * ROWS * head_dim
    num_row_partials = WARPS * ROWS
    result_words = ROWS * head_dim
    merge = merger(head_dim, ROWS, THREADS)
    infinity = float("inf")
    cap, is_capped = score_capper(softcap), softcap is not None

    def fma_attention(  # type: ignore[no-untyped-def]
        out,
        qkv,
        k_cache,
        v_cache,
        cu_seqlens_q,
        context_lens,
        block_tables,
        partials,
        stats,
        arrivals,
        num_heads,
        num_kv_heads,
        group_size,
        log2_block,
        max_blocks,
        window,
        num_splits,
        split_rows,
        scale,
    ):
        scores = cuda.shared.array(num_scores, float32, 16)  # [token, row]
        warp_values = cuda.shared.array(num_values, float32, 16)  # [warp, row, D]
        row_maxima = cuda.shared.array(num_row_partials, float32)  # [warp, row]
        row_sums = cuda.shared.array(num_row_partials, float32)  # [warp, row]
        blocks = cuda.shared.array(32, uint32)
        arrived = cuda.shared.array(1, uint32)
        q = cuda.local.array(num_q, float32)
        words = cuda.local.array(num_words, uint32)
        dots = cuda.local.array(ROWS, float32)
        values = cuda.local.array(num_q, float32)
        own = cuda.local.array(num_own, float32)
        own_maximum = cuda.local.array(quads, float32)
        own_sum = cuda.local.array(quads, float32)

        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        c, part = uint32(lane & uint32(lanes - 1)), uint32(lane // uint32(lanes))
        kv_head, sequence = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        first_token = uint32(cu_seqlens_q[sequence])
        num_rows = uint32(uint32(uint32(cu_seqlens_q[sequence + 1]) - first_token) * group_size)
        tile, split = uint32(cuda.blockIdx.x), uint32(0)
        is_split = num_splits > uint32(1) and num_rows <= split_rows
        if is_split:
            tile = uint32(uint32(cuda.blockIdx.x) // num_splits)
            split = uint32(uint32(cuda.blockIdx.x) - tile * num_splits)
        if uint32(tile * uint32(ROWS)) >= num_rows:
            return
        first_row = uint32(tile * uint32(ROWS))
        first_position, last_row, begin, end = span_of_rows(
            cu_seqlens_q, context_lens, sequence, first_row, num_rows, ROWS, group_size, window
        )
        log2_e = float32(scale * float32(LOG2_E))

        for i in range(quads):
            own_maximum[i] = float32(-infinity)
            own_sum[i] = float32(0)
        for i in range(num_own):
            own[i] = float32(0)

        first_segment, last_segment = uint32(begin // uint32(SEGMENT)), uint32((end - uint32(1)) // uint32(SEGMENT))
        segment, stop = first_segment, last_segment
        if is_split:
            if split < first_segment or split > last_segment:
                return
            segment, stop = split, split
            is_split = first_segment < last_segment
        while segment <= stop:
            base = uint32(segment * uint32(SEGMENT))
            count = min(uint32(SEGMENT), uint32(end - base))

            # q to registers, by way of the scores' place: read coalesced, and once for the four warps
            quad_index = thread
            while quad_index < uint32(ROWS * row_quads):
                r = uint32(quad_index // uint32(row_quads))
                n = uint32(quad_index - r * uint32(row_quads))
                row = min(uint32(first_row + r), last_row)
                token = uint32(row // group_size)
                head = uint32(kv_head * group_size + (row - token * group_size))
                place = uint32((first_token + token) * (num_heads + uint32(2) * num_kv_heads) + head)
                quad = load_quad(qkv, uint32(place * uint32(head_dim) + n * uint32(4)))
                place = uint32((r * uint32(row_quads) + (n ^ ((n >> uint32(3)) & uint32(1)))) * uint32(4))
                scaled = (quad[0] * log2_e, quad[1] * log2_e, quad[2] * log2_e, quad[3] * log2_e)
                store_quad(scores, place, scaled)
                quad_index = uint32(quad_index + uint32(THREADS))
            cuda.syncthreads()
            for r in range(ROWS):
                for chunk in range(chunks):
                    for half in range(values_per_word):
                        n = uint32((uint32(chunk * lanes) + c) * uint32(values_per_word) + uint32(half))
                        quad = (float32(0), float32(0), float32(0), float32(0))
                        if n < uint32(row_quads):
                            place = uint32(uint32(r * row_quads) + (n ^ ((n >> uint32(3)) & uint32(1))))
                            quad = load_quad(scores, uint32(place * uint32(4)))
                        for i in range(4):
                            q[r * lane_dims + chunk * dims + 4 * half + i] = quad[i]

            # 1. scores
            if uint32(thread << log2_block) < count:
                entry = uint32(sequence * max_blocks + (base >> log2_block) + thread)
                blocks[thread] = uint32(block_tables[entry])
            cuda.syncthreads()
            step = uint32(0)
            while step < count:
                for u in range(LOADS):
                    token = uint32(step + (uint32(u * WARPS) + warp) * uint32(tokens) + part)
                    if token < count:
                        row = uint32((blocks[uint32(token >> log2_block)] * num_kv_heads + kv_head) << log2_block)
                        row = uint32(row + (token & uint32((uint32(1) << log2_block) - uint32(1))))
                        for chunk in range(chunks):
                            word = uint32((uint32(chunk * lanes) + c) * uint32(4))
                            if word < uint32(words_per_token):
                                quad = load_quad(k_cache, uint32(row * uint32(words_per_token) + word))
                                for i in range(4):
                                    words[4 * (u * chunks + chunk) + i] = quad[i]
                for u in range(LOADS):
                    token = uint32(step + (uint32(u * WARPS) + warp) * uint32(tokens) + part)
                    for r in range(ROWS):
                        dots[r] = float32(0)
                    for chunk in range(chunks):
                        word = uint32((uint32(chunk * lanes) + c) * uint32(4))
                        if token < count and word < uint32(words_per_token):
                            for i in range(dims):
                                value = to_float(
                                    words[4 * (u * chunks + chunk) + i // values_per_word], i % values_per_word
                                )
                                for r in range(ROWS):
                                    dots[r] = fma(q[r * lane_dims + chunk * dims + i], value, dots[r])
                    # The first steps of the butterfly halve the rows a lane cares for: lane c ends with row c % 8.
                    bit0, bit1 = uint32(c & uint32(1)) != uint32(0), uint32(c & uint32(2)) != uint32(0)
                    bit2 = uint32(c & uint32(4)) != uint32(0)
                    for r in range(4):
                        low, high = dots[2 * r], dots[2 * r + 1]
                        dots[r] = select(bit0, high, low) + cuda.shfl_xor_sync(FULL_WARP, select(bit0, low, high), 1)
                    for r in range(2):
                        low, high = dots[2 * r], dots[2 * r + 1]
                        dots[r] = select(bit1, high, low) + cuda.shfl_xor_sync(FULL_WARP, select(bit1, low, high), 2)
                    low, high = dots[0], dots[1]
                    score = select(bit2, high, low) + cuda.shfl_xor_sync(FULL_WARP, select(bit2, low, high), 4)
                    if lanes > 8:
                        score += cuda.shfl_xor_sync(FULL_WARP, score, 8)
                    if lanes > 16:
                        score += cuda.shfl_xor_sync(FULL_WARP, score, 16)
                    if is_capped:
                        score = cap(score)
                    if token < count and c < uint32(ROWS):
                        position = uint32(base + token)
                        own_position = uint32(first_position + min(uint32(first_row + c), last_row) // group_size)
                        if position > own_position or uint32(position + window) <= own_position:
                            score = float32(-infinity)
                        scores[uint32(token * uint32(ROWS) + c)] = score
                step = uint32(step + uint32(stride))
            cuda.syncthreads()

            # 2. softmax: thread (i, row) takes tokens i, i + 16, …
            row, i = uint32(thread & uint32(ROWS - 1)), uint32(thread // uint32(ROWS))
            maximum = float32(-infinity)
            token = i
            while token < count:
                maximum = max(maximum, scores[uint32(token * uint32(ROWS) + row)])
                token = uint32(token + uint32(THREADS // ROWS))
            maximum = max(maximum, cuda.shfl_xor_sync(FULL_WARP, maximum, 8))
            maximum = max(maximum, cuda.shfl_xor_sync(FULL_WARP, maximum, 16))
            if lane < uint32(ROWS):
                row_maxima[uint32(warp * uint32(ROWS) + lane)] = maximum
            cuda.syncthreads()
            for w in range(WARPS):
                maximum = max(maximum, row_maxima[uint32(uint32(w * ROWS) + row)])
            finite_maximum = select(maximum == float32(-infinity), float32(0), maximum)
            total = float32(0)
            token = i
            while token < count:
                place = uint32(token * uint32(ROWS) + row)
                p = exp2(float32(scores[place] - finite_maximum))
                scores[place] = p
                total += p
                token = uint32(token + uint32(THREADS // ROWS))
            total += cuda.shfl_xor_sync(FULL_WARP, total, 8)
            total += cuda.shfl_xor_sync(FULL_WARP, total, 16)
            if lane < uint32(ROWS):
                row_sums[uint32(warp * uint32(ROWS) + lane)] = total
            cuda.syncthreads()

            # 3. values
            for i in range(num_q):
                values[i] = float32(0)
            step = uint32(0)
            while step < count:
                for u in range(LOADS):
                    token = uint32(step + (uint32(u * WARPS) + warp) * uint32(tokens) + part)
                    if token < count:
                        row = uint32((blocks[uint32(token >> log2_block)] * num_kv_heads + kv_head) << log2_block)
                        row = uint32(row + (token & uint32((uint32(1) << log2_block) - uint32(1))))
                        for chunk in range(chunks):
                            word = uint32((uint32(chunk * lanes) + c) * uint32(4))
                            if word < uint32(words_per_token):
                                quad = load_quad(v_cache, uint32(row * uint32(words_per_token) + word))
                                for i in range(4):
                                    words[4 * (u * chunks + chunk) + i] = quad[i]
                for u in range(LOADS):
                    token = uint32(step + (uint32(u * WARPS) + warp) * uint32(tokens) + part)
                    if token < count:
                        low_rows = load_quad(scores, uint32(token * uint32(ROWS)))
                        high_rows = load_quad(scores, uint32(token * uint32(ROWS) + uint32(4)))
                        for chunk in range(chunks):
                            word = uint32((uint32(chunk * lanes) + c) * uint32(4))
                            if word < uint32(words_per_token):
                                for i in range(dims):
                                    value = to_float(
                                        words[4 * (u * chunks + chunk) + i // values_per_word], i % values_per_word
                                    )
                                    for r in range(4):
                                        at = r * lane_dims + chunk * dims + i
                                        values[at] = fma(low_rows[r], value, values[at])
                                        at = (r + 4) * lane_dims + chunk * dims + i
                                        values[at] = fma(high_rows[r], value, values[at])
                step = uint32(step + uint32(stride))
            for i in range(num_q):
                if lanes < 16:
                    values[i] += cuda.shfl_xor_sync(FULL_WARP, values[i], 8)
                if lanes < 32:
                    values[i] += cuda.shfl_xor_sync(FULL_WARP, values[i], 16)
            if part == uint32(0):
                for r in range(ROWS):
                    for chunk in range(chunks):
                        for half in range(values_per_word):
                            n = uint32((uint32(chunk * lanes) + c) * uint32(values_per_word) + uint32(half))
                            if n < uint32(row_quads):
                                at = r * lane_dims + chunk * dims + 4 * half
                                place = uint32(
                                    (warp * uint32(ROWS) + uint32(r)) * uint32(row_quads)
                                    + (n ^ ((n >> uint32(3)) & uint32(1)))
                                )
                                store_quad(
                                    warp_values,
                                    uint32(place * uint32(4)),
                                    (values[at], values[at + 1], values[at + 2], values[at + 3]),
                                )
            cuda.syncthreads()

            # The segment's result, merged into each thread's own quads of it.
            for m in range(quads):
                quad_index = uint32(thread + uint32(m * THREADS))
                row = uint32(quad_index // uint32(row_quads))
                if row < uint32(ROWS):
                    n = uint32(quad_index - row * uint32(row_quads))
                    place = uint32((row * uint32(row_quads) + (n ^ ((n >> uint32(3)) & uint32(1)))) * uint32(4))
                    w0 = load_quad(warp_values, place)
                    w1 = load_quad(warp_values, uint32(place + uint32(result_words)))
                    w2 = load_quad(warp_values, uint32(place + uint32(2 * result_words)))
                    w3 = load_quad(warp_values, uint32(place + uint32(3 * result_words)))
                    m0, m1 = row_maxima[row], row_maxima[uint32(row + uint32(ROWS))]
                    m2, m3 = row_maxima[uint32(row + uint32(2 * ROWS))], row_maxima[uint32(row + uint32(3 * ROWS))]
                    s0, s1 = row_sums[row], row_sums[uint32(row + uint32(ROWS))]
                    s2, s3 = row_sums[uint32(row + uint32(2 * ROWS))], row_sums[uint32(row + uint32(3 * ROWS))]
                    total = float32(float32(s0 + s1) + float32(s2 + s3))
                    if total > float32(0):
                        segment_maximum = max(max(m0, m1), max(m2, m3))
                        maximum = max(own_maximum[m], segment_maximum)
                        old_weight = exp2(float32(own_maximum[m] - maximum))
                        new_weight = exp2(float32(segment_maximum - maximum))
                        own_maximum[m] = maximum
                        own_sum[m] = fma(total, new_weight, float32(own_sum[m] * old_weight))
                        for i in range(4):
                            value = float32(float32(w0[i] + w1[i]) + float32(w2[i] + w3[i]))
                            own[4 * m + i] = fma(value, new_weight, float32(own[4 * m + i] * old_weight))
            segment = uint32(segment + uint32(1))

        if is_split:
            parts = uint32(uint32(sequence * num_kv_heads + kv_head) * num_splits)
            for m in range(quads):
                quad_index = uint32(thread + uint32(m * THREADS))
                r = uint32(quad_index // uint32(row_quads))
                row = uint32(first_row + r)
                if r < uint32(ROWS) and row <= last_row:
                    n = uint32(quad_index - r * uint32(row_quads))
                    place = uint32(uint32(parts + split) * split_rows + row)
                    quad = (own[4 * m], own[4 * m + 1], own[4 * m + 2], own[4 * m + 3])
                    store_quad(partials, uint32(place * uint32(head_dim) + n * uint32(4)), quad)
                    if n == uint32(0):
                        stats[uint32(place * uint32(2))] = own_maximum[m]
                        stats[uint32(place * uint32(2) + uint32(1))] = own_sum[m]
            counter = uint32(uint32(sequence * num_kv_heads + kv_head) * (split_rows // uint32(ROWS)) + tile)
            if not is_last_to_arrive(arrivals, counter, uint32(last_segment - first_segment + uint32(1)), arrived):
                return
            merge(
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
            )
            return

        for m in range(quads):
            quad_index = uint32(thread + uint32(m * THREADS))
            r = uint32(quad_index // uint32(row_quads))
            row = uint32(first_row + r)
            if r < uint32(ROWS) and row <= last_row:
                token = uint32(row // group_size)
                head = uint32(kv_head * group_size + (row - token * group_size))
                place = uint32((first_token + token) * num_heads + head)
                n = uint32(quad_index - r * uint32(row_quads))
                quad = (
                    divide(own[4 * m], own_sum[m]),
                    divide(own[4 * m + 1], own_sum[m]),
                    divide(own[4 * m + 2], own_sum[m]),
                    divide(own[4 * m + 3], own_sum[m]),
                )
                store_quad(out, uint32(place * uint32(head_dim) + n * uint32(4)), quad)

    arguments = (float32[::1], float32[::1], uint32[::1], uint32[::1], int32[::1], int32[::1], int32[::1])
    return Kernel(
        name_with(softcap, f"attention_fma_d{head_dim}_{'f16' if is_half else 'f32'}"),
        fma_attention,
        (*arguments, float32[::1], float32[::1], uint32[::1], *[uint32] * 8, float32),
        THREADS,
    )
