"""attention of many rows (prefill): out = softmax(q kᵀ scale) v over the paged cache of halves, on tensor cores.

FlashAttention-2 (Dao 2023) over the paged cache (Kwon et al. 2023); the arithmetic is that of ``attention_tiles``.

Arrays (flat)
    out           float32 [num_tokens, H D]
    qkv           float32 [num_tokens, (H + 2 KV) D], only q is read
    k, v          the cache [B, KV, block_size, D], halves in pairs as uint32
    cu_seqlens_q  int32 [S + 1], context_lens int32 [S], block_tables int32 [S, max_blocks]

A block of 128 threads takes 64 *rows* of one sequence and KV head: (query token, query head) pairs of that KV head,
16 a warp. It walks the tiles of 64 tokens that its rows see. While one is computed with, keys and values of the next
are on their way by cp.async to the other half of shared memory. A warp

  1. has its q in registers, in two planes of halves, as mma's A; multiplies with the tile's keys, whose B it reads 16
     bytes a lane: lane (g, t) has dimensions 8t … 8t + 7 (of 32) of token g, so 8t … 8t + 3 are its share of one
     product of depth 16 and 8t + 4 … 8t + 7 of the next. A sum has no order, and q is arranged alike;
  2. makes p of the scores, which lie in registers as mma's C, just as mma's A wants them;
  3. multiplies p, in two planes, with the tile's values, whose B ldmatrix.trans reads.

At the end of a segment of four tiles the segment's result is merged into the rows' own, which lies in shared memory
(touched once in 256 tokens, it would take a quarter of the registers). Tiles that none of a warp's rows sees are left
out: they would change nothing.

Shared memory: two tiles of keys and of values, [64 tokens, D] as halves; 16-byte units of a token XOR-ed so that the 8
lanes of a 128-bit read, two tokens of keys or 8 of values, meet 8 bank groups. The result so far [D / 2, thread, 2]
floats, if a context exceeds a segment.

Bytes moved: q and out once; keys and values of the context once per 64 rows, through L2. In flight: a tile of both, for
D = 128 32 KB a block.
"""

from __future__ import annotations

from functools import cache

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.attention_tiles import (
    LOG2_E,
    SEGMENT,
    TILE,
    advance_softmax,
    key_multiplier,
    load_query,
    multiply_values,
    span_of_rows,
    split_planes,
    sum_over_lanes_of_a_row,
)
from numba_engine.backends.cuda.kernels.decode_attention import units_of, value_swizzle
from numba_engine.backends.cuda.kernels.intrinsics import divide, exp2, fma, select, store_pair
from numba_engine.backends.cuda.kernels.soft_cap import name_with, score_capper
from numba_engine.backends.cuda.kernels.tensor_cores import (
    commit_copies,
    copy_async,
    load_matrices_transposed,
    load_pair,
    load_shared_quad,
    shared_address,
    wait_for_copies,
)
from numba_engine.backends.cuda.kernels.unrolling import static_range, unroll

THREADS = 128
WARP_ROWS = 16
ROWS = THREADS // 32 * WARP_ROWS
MAX_HEAD_DIM = 128
"""More would not fit the registers: results and q are head_dim floats a lane."""
FLIGHT = 4
"""Times 8 tokens whose scores a warp computes side by side."""


def tile_bytes(head_dim: int) -> int:
    return TILE * units_of(head_dim) * 16


def shared_bytes(head_dim: int, max_context_len: int) -> int:
    results = 4 * ROWS * -(-head_dim // 16) * 16 if max_context_len > SEGMENT else 0
    return 4 * tile_bytes(head_dim) + results


@cache
def prefill_attention_kernel(head_dim: int, softcap: float | None = None) -> Kernel:
    """For head_dim a multiple of 8 up to 128."""
    assert head_dim % 8 == 0
    assert head_dim <= MAX_HEAD_DIM
    units, token_units = head_dim // 8, units_of(head_dim)
    chunks = token_units // 4  # of 32 dimensions
    token_words, token_bytes = head_dim // 2, 16 * token_units
    tile_size = tile_bytes(head_dim)
    key_flip = 4 if token_units % 8 == 0 else 0
    swizzle_shift, swizzle_mask = value_swizzle(head_dim)
    multiply_keys = key_multiplier(FLIGHT, 4)
    copy_tokens = THREADS // token_units // 8 * 8  # that the block copies at a time: a unit a thread
    copies = TILE // copy_tokens
    pairs = -(-head_dim // 16)  # of 8 dimensions of the result
    num_q, num_words, num_results = 16 * chunks, 4 * FLIGHT, 8 * pairs
    results_at = tile_size  # in floats: behind four tiles
    segment_tiles = SEGMENT // TILE
    infinity = float("inf")
    cap, is_capped = score_capper(softcap), softcap is not None

    @cuda.jit(device=True, inline="always")
    def copy_tile(  # type: ignore[no-untyped-def]
        target, k_cache, v_cache, block_tables, table, first, end, kv_head, num_kv_heads, log2_block
    ):
        """Keys and values of tokens ``first`` … to shared memory, zeros from token ``end`` on."""
        blocks = cuda.local.array(copies, uint32)
        token = uint32(uint32(cuda.threadIdx.x) // uint32(token_units))
        unit = uint32(uint32(cuda.threadIdx.x) - token * uint32(token_units))
        keys = uint32(target + token * uint32(token_bytes))
        values = uint32(keys + uint32(2 * tile_size))
        keys = uint32(keys + (unit ^ ((token & uint32(1)) * uint32(key_flip))) * uint32(16))
        values = uint32(values + (unit ^ ((token >> uint32(swizzle_shift)) & uint32(swizzle_mask))) * uint32(16))
        if token < uint32(copy_tokens):
            for u in range(copies):
                position = min(uint32(first + token + uint32(u * copy_tokens)), uint32(end - uint32(1)))
                blocks[u] = uint32(block_tables[uint32(table + (position >> log2_block))])
            for u in range(copies):
                position = uint32(first + token + uint32(u * copy_tokens))
                row = uint32((blocks[u] * num_kv_heads + kv_head) << log2_block)
                row = uint32(row + (position & uint32((uint32(1) << log2_block) - uint32(1))))
                num_bytes = uint32(16) if position < end and unit < uint32(units) else uint32(0)
                word = uint32(row * uint32(token_words) + unit * uint32(4))
                copy_async(uint32(keys + uint32(u * copy_tokens * token_bytes)), k_cache, word, num_bytes)
                copy_async(uint32(values + uint32(u * copy_tokens * token_bytes)), v_cache, word, num_bytes)
        commit_copies()

    @unroll
    def prefill_attention(  # type: ignore[no-untyped-def]
        out,
        qkv,
        k_cache,
        v_cache,
        cu_seqlens_q,
        context_lens,
        block_tables,
        num_heads,
        num_kv_heads,
        group_size,
        log2_block,
        max_blocks,
        window,
        split_rows,
        scale,
    ):
        shared = cuda.shared.array(0, float32, 16)  # keys of two tiles, values of two tiles, results so far
        q = cuda.local.array(num_q, uint32)  # [chunk, half of it, plane, register]
        words = cuda.local.array(num_words, uint32)
        planes = cuda.local.array(8, uint32)
        p = cuda.local.array(32, float32)
        maxima = cuda.local.array(2, float32)
        sums = cuda.local.array(2, float32)
        weights = cuda.local.array(2, float32)
        own_maxima = cuda.local.array(2, float32)
        own_sums = cuda.local.array(2, float32)
        own_weights = cuda.local.array(2, float32)
        positions = cuda.local.array(2, uint32)
        result = cuda.local.array(num_results, float32)  # [pair, half of it, 4]

        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        g, t = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        kv_head, sequence = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        first_token = uint32(cu_seqlens_q[sequence])
        num_rows = uint32(uint32(uint32(cu_seqlens_q[sequence + 1]) - first_token) * group_size)
        first_row = uint32(uint32(cuda.blockIdx.x) * uint32(ROWS))
        if num_rows <= split_rows or first_row >= num_rows:
            return
        first_position, last_row, begin, end = span_of_rows(
            cu_seqlens_q, context_lens, sequence, first_row, num_rows, ROWS, group_size, window
        )
        tile, last_tile = uint32(begin // uint32(TILE)), uint32((end - uint32(1)) // uint32(TILE))
        is_merged = uint32(begin // uint32(SEGMENT)) < uint32((end - uint32(1)) // uint32(SEGMENT))
        table = uint32(sequence * max_blocks)
        base = shared_address(shared)
        buffer = uint32(base)
        copy_tile(
            buffer,
            k_cache,
            v_cache,
            block_tables,
            table,
            uint32(tile * uint32(TILE)),
            end,
            kv_head,
            num_kv_heads,
            log2_block,
        )

        # The warp's rows: which positions they are at, and q, in planes of halves.
        warp_row = uint32(first_row + warp * uint32(WARP_ROWS))
        log2_scale = float32(scale * float32(LOG2_E))
        for h in static_range(2):
            row = min(uint32(warp_row + g + uint32(8 * h)), last_row)
            token = uint32(row // group_size)
            positions[h] = uint32(first_position + token)
            head = uint32(kv_head * group_size + (row - token * group_size))
            place = uint32((first_token + token) * (num_heads + uint32(2) * num_kv_heads) + head)
            place = uint32(place * uint32(head_dim))
            for c in static_range(chunks):
                load_query(qkv, place, uint32(uint32(4 * c) + t), units, log2_scale, q, 16 * c + h)
            maxima[h] = own_maxima[h] = float32(-infinity)
            sums[h] = own_sums[h] = float32(0)
        warp_first = uint32(first_position + min(warp_row, last_row) // group_size)
        warp_last = uint32(first_position + min(uint32(warp_row + uint32(WARP_ROWS - 1)), last_row) // group_size)
        for i in range(num_results):
            result[i] = float32(0)
        own = uint32(uint32(results_at) + thread * uint32(2))
        if is_merged:
            for i in range(num_results // 2):
                store_pair(shared, uint32(own + uint32(2 * THREADS * i)), (float32(0), float32(0)))

        key_row, key_place = (
            uint32(g * uint32(token_bytes)),
            uint32((t ^ ((g & uint32(1)) * uint32(key_flip))) * uint32(16)),
        )
        matrix_row, matrix = uint32(lane & uint32(7)), uint32(lane >> uint32(3))
        flip = uint32((matrix_row >> uint32(swizzle_shift)) & uint32(swizzle_mask)) ^ uint32(matrix >> uint32(1))
        value_lane = uint32(
            uint32(2 * tile_size) + ((matrix & uint32(1)) * uint32(8) + matrix_row) * uint32(token_bytes)
        )
        while tile <= last_tile:
            wait_for_copies()
            cuda.syncthreads()
            first = uint32(tile * uint32(TILE))
            if tile < last_tile:
                copy_tile(
                    uint32(base + (uint32(tile_size) - (buffer - base))),
                    k_cache,
                    v_cache,
                    block_tables,
                    table,
                    uint32(first + uint32(TILE)),
                    end,
                    kv_head,
                    num_kv_heads,
                    log2_block,
                )

            if first <= warp_last and uint32(first + uint32(TILE - 1) + window) > warp_first:
                # 1. scores
                for i in range(32):
                    p[i] = float32(0)
                for c in static_range(chunks):
                    for half in static_range(8 // FLIGHT):
                        for u in range(FLIGHT):
                            n = half * FLIGHT + u
                            key = uint32(buffer + key_row + uint32(n * 8 * token_bytes) + (key_place ^ uint32(64 * c)))
                            load_shared_quad(words, 4 * u, key)
                        multiply_keys(p, 4 * FLIGHT * half, q, 16 * c, words, 0)
                if is_capped:
                    for i in range(32):
                        p[i] = cap(p[i])
                if uint32(first + uint32(TILE - 1)) > warp_first or uint32(first + window) <= warp_last:
                    for n in static_range(8):
                        for h in static_range(2):
                            for i in static_range(2):
                                position = uint32(first + uint32(8 * n + i) + t * uint32(2))
                                if position > positions[h] or uint32(position + window) <= positions[h]:
                                    p[4 * n + 2 * h + i] = float32(-infinity)
                # 2. softmax
                for h in static_range(2):
                    advance_softmax(p, maxima, sums, weights, h)
                for i in range(2 * pairs):
                    for h in static_range(2):
                        result[4 * i + 2 * h] *= weights[h]
                        result[4 * i + 2 * h + 1] *= weights[h]
                # 3. values
                for k in static_range(TILE // 16):
                    split_planes(p, 8 * k, planes)
                    row_address = uint32(buffer + uint32(16 * k * token_bytes) + value_lane)
                    for j in static_range(pairs):
                        load_matrices_transposed(words, 0, uint32(row_address + (uint32(2 * j) ^ flip) * uint32(16)))
                        multiply_values(result, 8 * j, planes, 0, words, 0)

            if tile == last_tile or uint32(tile % uint32(segment_tiles)) == uint32(segment_tiles - 1):
                for h in static_range(2):
                    sums[h] = sum_over_lanes_of_a_row(sums[h])
                if is_merged:
                    for h in static_range(2):
                        # nothing where a row sees none of the segment
                        maximum = max(own_maxima[h], maxima[h])
                        is_seen = sums[h] > float32(0)
                        weights[h] = select(is_seen, exp2(float32(own_maxima[h] - maximum)), float32(1))
                        own_weights[h] = select(is_seen, exp2(float32(maxima[h] - maximum)), float32(0))
                        own_maxima[h] = maximum
                        sums[h] = fma(sums[h], own_weights[h], float32(own_sums[h] * weights[h]))
                        own_sums[h] = sums[h]
                    for i in range(num_results // 2):
                        h = i % 2
                        place = uint32(own + uint32(2 * THREADS * i))
                        before = load_pair(shared, place)
                        a = fma(result[2 * i], own_weights[h], float32(before[0] * weights[h]))
                        b = fma(result[2 * i + 1], own_weights[h], float32(before[1] * weights[h]))
                        if tile < last_tile:
                            store_pair(shared, place, (a, b))
                            a = b = float32(0)
                        result[2 * i], result[2 * i + 1] = a, b
                    if tile < last_tile:
                        for h in static_range(2):
                            maxima[h] = float32(-infinity)
                            sums[h] = float32(0)
            buffer = uint32(base + (uint32(tile_size) - (buffer - base)))
            tile = uint32(tile + uint32(1))

        for h in static_range(2):
            row = uint32(warp_row + g + uint32(8 * h))
            if row <= last_row:
                token = uint32(row // group_size)
                head = uint32(kv_head * group_size + (row - token * group_size))
                place = uint32((first_token + token) * num_heads + head)
                for i in range(2 * pairs):
                    dim = uint32(uint32(8 * i) + t * uint32(2))
                    if dim < uint32(head_dim):
                        a = divide(result[4 * i + 2 * h], sums[h])
                        b = divide(result[4 * i + 2 * h + 1], sums[h])
                        store_pair(out, uint32(place * uint32(head_dim) + dim), (a, b))

    arguments = (float32[::1], float32[::1], uint32[::1], uint32[::1], int32[::1], int32[::1], int32[::1])
    return Kernel(
        name_with(softcap, f"attention_prefill_d{head_dim}"),
        prefill_attention,
        (*arguments, *[uint32] * 7, float32),
        THREADS,
    )
