"""attention of few rows (decode): out = softmax(q kᵀ scale) v over the paged cache of halves, on tensor cores.

Split over the context as in "Flash-Decoding" (Dao et al. 2023), the paged cache after Kwon et al. 2023; the arithmetic
is that of ``attention_tiles``.

Arrays (flat)
    out           float32 [num_tokens, H D]
    qkv           float32 [num_tokens, (H + 2 KV) D], only q is read
    k, v          the cache [B, KV, block_size, D], halves in pairs as uint32
    cu_seqlens_q  int32 [S + 1], context_lens int32 [S], block_tables int32 [S, max_blocks]
    partials      float32 [S, KV, num_splits, split_rows, D] and stats float32 [S, KV, num_splits, split_rows, 2]
    arrivals      uint32 [S, KV, tiles of split_rows], zero before and after

A block of 128 threads takes one segment of the context, one KV head and 8 or 16 *rows*: (query token, query head)
pairs of that KV head, which in decode are all the heads that share it. So keys and values are read once.

  0. The segment's values start on their way to shared memory, by cp.async, and arrive while the scores are computed.
  1. Scores: the four warps take every fourth 8 tokens. A key goes from memory to registers as mma's B: lane (g, t)
     reads 16 bytes of token g, dimensions 8t … 8t + 7 of 32. That makes dimensions 8t … 8t + 3 the lane's share of one
     product of depth 16 and 8t + 4 … 8t + 7 of the next: a sum has no order, and q is arranged alike. Masked scores go
     to shared memory.
  2. Each warp takes all tokens for its own dimensions of the result: it makes p of the scores anew (a few percent of
     the work, and one barrier less) and multiplies with the values by ldmatrix.trans.

If the rows see more than one segment, the block writes its part and counts itself in; the one that comes last merges
the parts in the order of the segments, whatever the order in which blocks arrived. Blocks of a grid larger than the
context needs leave at once and are not waited for.

Shared memory: the values [256 tokens, D] as halves, 16-byte units of a token XOR-ed with its number so that the 8 rows
of a matrix lie in 8 bank groups; the scores [rows, 256 + 8]. Rows beyond those there are repeat the last one.

Bytes moved: keys and values of every token once per tile of rows; q and out once; with more than one segment the parts,
rows * (D + 2) floats each, once each way through L2. In flight a block has all its values and 16 16-byte loads of keys
a lane: for D = 128, 64 KB and 32 KB.
"""

from __future__ import annotations

from functools import cache

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.arrivals import is_last_to_arrive
from numba_engine.backends.cuda.kernels.attention_tiles import (
    LOG2_E,
    SEGMENT,
    TILE,
    advance_softmax,
    key_multiplier,
    load_query,
    merger,
    multiply_values,
    span_of_rows,
    split_planes,
    sum_over_lanes_of_a_row,
)
from numba_engine.backends.cuda.kernels.intrinsics import divide, store_pair
from numba_engine.backends.cuda.kernels.soft_cap import name_with, score_capper
from numba_engine.backends.cuda.kernels.tensor_cores import (
    commit_copies,
    copy_async,
    load_matrices_transposed,
    load_pair,
    load_quad_once,
    shared_address,
    wait_for_copies,
)
from numba_engine.backends.cuda.kernels.unrolling import static_range, unroll

THREADS = 128
WARPS = THREADS // 32
SCORES_STRIDE = SEGMENT + 8
"""Of a row: 8 rows then lie in different banks."""


def units_of(head_dim: int) -> int:
    """16-byte units a token takes in shared memory: whole 64 bytes, as four lanes read."""
    return -(-head_dim // 32) * 4


def value_swizzle(head_dim: int) -> tuple[int, int]:
    """(shift, mask): the unit of a token of values is XOR-ed with token >> shift & mask."""
    return (0, 7) if units_of(head_dim) % 8 == 0 else (1, 3)


def shared_bytes(head_dim: int) -> int:
    return SEGMENT * units_of(head_dim) * 16


@cache
def decode_attention_kernel(head_dim: int, rows: int, softcap: float | None = None) -> Kernel:
    """For head_dim a multiple of 8 up to 128, and 8 or 16 rows a block."""
    assert head_dim % 8 == 0
    assert rows in (8, 16)
    halves = rows // 8
    units, token_units = head_dim // 8, units_of(head_dim)
    chunks = token_units // 4  # of 32 dimensions
    token_words = head_dim // 2
    token_bytes = 16 * token_units
    swizzle_shift, swizzle_mask = value_swizzle(head_dim)
    copy_tokens = THREADS // token_units // 8 * 8  # whose values the block copies at a time: a unit a thread
    copies = min(4, TILE // copy_tokens)
    flight = 8 if chunks <= 2 else 4  # times 8 tokens, whose keys a warp has in flight
    pairs = -(-head_dim // 16)  # of 8 dimensions of the result
    warp_pairs = -(-pairs // WARPS)
    num_q, num_words, num_flight = 16 * chunks, 4 * chunks * flight, 4 * flight
    num_results, num_scores = 8 * warp_pairs, rows * SCORES_STRIDE
    multiply_keys = key_multiplier(flight, 4 * chunks)
    merge = merger(head_dim, rows, THREADS)
    infinity = float("inf")
    cap, is_capped = score_capper(softcap), softcap is not None

    @unroll
    def decode_attention(  # type: ignore[no-untyped-def]
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
        scores = cuda.shared.array(num_scores, float32, 16)  # [row, token]
        arrived = cuda.shared.array(1, uint32)
        staged = cuda.shared.array(0, uint32, 16)  # the values [token, unit]
        q = cuda.local.array(num_q, uint32)  # [chunk, half of it, plane, register]
        words = cuda.local.array(num_words, uint32)
        blocks = cuda.local.array(8, uint32)
        planes = cuda.local.array(8, uint32)
        matrices = cuda.local.array(4, uint32)
        dots = cuda.local.array(num_flight, float32)
        p = cuda.local.array(32, float32)
        maxima = cuda.local.array(2, float32)
        sums = cuda.local.array(2, float32)
        weights = cuda.local.array(2, float32)
        result = cuda.local.array(num_results, float32)  # [pair, half of it, 4]

        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        kv_head, sequence = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        first_token = uint32(cu_seqlens_q[sequence])
        num_rows = uint32(uint32(uint32(cu_seqlens_q[sequence + 1]) - first_token) * group_size)
        tile = uint32(uint32(cuda.blockIdx.x) // num_splits)
        split = uint32(uint32(cuda.blockIdx.x) - tile * num_splits)
        first_row = uint32(tile * uint32(rows))
        if num_rows > split_rows or first_row >= num_rows:
            return
        first_position, last_row, begin, end = span_of_rows(
            cu_seqlens_q, context_lens, sequence, first_row, num_rows, rows, group_size, window
        )
        earliest = uint32(first_position + first_row // group_size + uint32(1))  # where the first row's context ends
        first_segment, last_segment = uint32(begin // uint32(SEGMENT)), uint32((end - uint32(1)) // uint32(SEGMENT))
        if split < first_segment or split > last_segment:
            return
        base = uint32(split * uint32(SEGMENT))
        count = min(uint32(SEGMENT), uint32(end - base))
        table = uint32(sequence * max_blocks + (base >> log2_block))
        in_block = uint32((uint32(1) << log2_block) - uint32(1))

        # 0. values on their way, whole tiles of them, zero where there is no token
        staged_bytes = shared_address(staged)
        padded_count = uint32((count + uint32(TILE - 1)) // uint32(TILE) * uint32(TILE))
        copied = uint32(thread // uint32(token_units))
        unit = uint32(thread - copied * uint32(token_units))
        place = uint32(unit ^ ((copied >> uint32(swizzle_shift)) & uint32(swizzle_mask)))
        target = uint32(staged_bytes + copied * uint32(token_bytes) + place * uint32(16))
        if copied >= uint32(copy_tokens):
            copied = padded_count  # a thread too many for whole tokens
        while copied < padded_count:
            for u in range(copies):
                token = min(uint32(copied + uint32(u * copy_tokens)), uint32(count - uint32(1)))
                blocks[u] = uint32(block_tables[uint32(table + (token >> log2_block))])
            for u in range(copies):
                token = uint32(copied + uint32(u * copy_tokens))
                row = uint32(uint32((blocks[u] * num_kv_heads + kv_head) << log2_block) + (token & in_block))
                num_bytes = uint32(16) if token < count and unit < uint32(units) else uint32(0)
                word = uint32(row * uint32(token_words) + unit * uint32(4))
                copy_async(uint32(target + uint32(u * copy_tokens * token_bytes)), v_cache, word, num_bytes)
            copied = uint32(copied + uint32(copies * copy_tokens))
            target = uint32(target + uint32(copies * copy_tokens * token_bytes))
        commit_copies()

        # 1. scores
        log2_scale = float32(scale * float32(LOG2_E))
        for h in static_range(2):
            row = min(uint32(first_row + g + uint32(8 * h)), last_row)
            token = uint32(row // group_size)
            head = uint32(kv_head * group_size + (row - token * group_size))
            place = uint32((first_token + token) * (num_heads + uint32(2) * num_kv_heads) + head)
            place = uint32(place * uint32(head_dim))
            for c in static_range(chunks):
                if h < halves:
                    load_query(qkv, place, uint32(uint32(4 * c) + t), units, log2_scale, q, 16 * c + h)
                else:
                    for i in range(8):
                        q[16 * c + 2 * i + 1] = uint32(0)
        step = uint32(0)
        while step < count:
            for u in range(flight):
                token = min(uint32(step + (uint32(u * WARPS) + warp) * uint32(8)), uint32(count - uint32(1)))
                blocks[u] = uint32(block_tables[uint32(table + (token >> log2_block))])
            for u in static_range(flight):
                first = uint32(step + (uint32(u * WARPS) + warp) * uint32(8))
                if first < count:
                    token = min(uint32(first + g), uint32(count - uint32(1)))
                    row = uint32(uint32((blocks[u] * num_kv_heads + kv_head) << log2_block) + (token & in_block))
                    for c in static_range(chunks):
                        unit = min(uint32(uint32(4 * c) + t), uint32(units - 1))
                        word = uint32(row * uint32(token_words) + unit * uint32(4))
                        load_quad_once(words, 4 * (u * chunks + c), k_cache, word)
            for i in range(num_flight):
                dots[i] = float32(0)
            for c in static_range(chunks):
                multiply_keys(dots, 0, q, 16 * c, words, 4 * c)
            if is_capped:
                for i in range(num_flight):
                    dots[i] = cap(dots[i])
            first = uint32(base + step)
            is_masked = uint32(first + uint32(8 * WARPS * flight)) > earliest or uint32(first + window) < end
            for h in static_range(halves):
                row = min(uint32(first_row + g + uint32(8 * h)), last_row)
                own_position = uint32(first_position + row // group_size)
                for u in range(flight):
                    token = uint32(step + (uint32(u * WARPS) + warp) * uint32(8) + t * uint32(2))
                    if is_masked:
                        for i in range(2):
                            position = uint32(base + token + uint32(i))
                            if position > own_position or uint32(position + window) <= own_position:
                                dots[4 * u + 2 * h + i] = float32(-infinity)
                    place = uint32((g + uint32(8 * h)) * uint32(SCORES_STRIDE) + token)
                    store_pair(scores, place, (dots[4 * u + 2 * h], dots[4 * u + 2 * h + 1]))
            step = uint32(step + uint32(8 * WARPS * flight))
        wait_for_copies()
        cuda.syncthreads()

        # 2. softmax and values
        for h in static_range(2):
            maxima[h] = float32(-infinity)
            sums[h] = float32(0)
            weights[h] = float32(0)
        for i in range(num_results):
            result[i] = float32(0)
        for i in range(32):
            p[i] = float32(0)
        matrix_row, matrix = uint32(lane & uint32(7)), uint32(lane >> uint32(3))
        flip = uint32((matrix_row >> uint32(swizzle_shift)) & uint32(swizzle_mask)) ^ uint32(matrix >> uint32(1))
        lane_row = uint32((matrix & uint32(1)) * uint32(8) + matrix_row)
        step = uint32(0)
        while step < count:
            for h in static_range(halves):
                for n in range(8):
                    place = uint32((g + uint32(8 * h)) * uint32(SCORES_STRIDE) + step + uint32(8 * n) + t * uint32(2))
                    pair = load_pair(scores, place)
                    p[4 * n + 2 * h] = pair[0]
                    p[4 * n + 2 * h + 1] = pair[1]
            for h in static_range(halves):
                advance_softmax(p, maxima, sums, weights, h)
            for i in range(2 * warp_pairs):
                for h in static_range(halves):
                    result[4 * i + 2 * h] *= weights[h]
                    result[4 * i + 2 * h + 1] *= weights[h]
            for k in static_range(TILE // 16):
                split_planes(p, 8 * k, planes)
                token = uint32(step + uint32(16 * k) + lane_row)
                for j in static_range(warp_pairs):
                    pair_index = uint32(warp + uint32(j * WARPS))
                    if pair_index < uint32(pairs):
                        place = uint32(staged_bytes + token * uint32(token_bytes))
                        unit = uint32((pair_index * uint32(2)) ^ flip)
                        load_matrices_transposed(matrices, 0, uint32(place + unit * uint32(16)))
                        multiply_values(result, 8 * j, planes, 0, matrices, 0)
            step = uint32(step + uint32(TILE))

        # The result, or the segment's part of it.
        is_split = first_segment < last_segment
        parts = uint32(uint32(sequence * num_kv_heads + kv_head) * num_splits)
        for h in static_range(halves):
            total = sum_over_lanes_of_a_row(sums[h])
            row = uint32(first_row + g + uint32(8 * h))
            if row <= last_row:
                part = uint32(uint32(parts + split) * split_rows + row)
                if is_split and warp == uint32(0) and t == uint32(0):
                    store_pair(stats, uint32(part * uint32(2)), (maxima[h], total))
                token = uint32(row // group_size)
                head = uint32(kv_head * group_size + (row - token * group_size))
                place = uint32((first_token + token) * num_heads + head)
                for i in range(2 * warp_pairs):
                    dim = uint32((warp + uint32(i // 2 * WARPS)) * uint32(16) + uint32(i % 2 * 8) + t * uint32(2))
                    if dim < uint32(head_dim):
                        a, b = result[4 * i + 2 * h], result[4 * i + 2 * h + 1]
                        if is_split:
                            store_pair(partials, uint32(part * uint32(head_dim) + dim), (a, b))
                        else:
                            store_pair(
                                out, uint32(place * uint32(head_dim) + dim), (divide(a, total), divide(b, total))
                            )
        if is_split:
            counter = uint32(uint32(sequence * num_kv_heads + kv_head) * (split_rows // uint32(rows)) + tile)
            if is_last_to_arrive(arrivals, counter, uint32(last_segment - first_segment + uint32(1)), arrived):
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

    arguments = (float32[::1], float32[::1], uint32[::1], uint32[::1], int32[::1], int32[::1], int32[::1])
    return Kernel(
        name_with(softcap, f"attention_decode_d{head_dim}_x{rows}"),
        decode_attention,
        (*arguments, float32[::1], float32[::1], uint32[::1], *[uint32] * 8, float32),
        THREADS,
    )
