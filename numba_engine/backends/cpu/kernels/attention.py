"""attention: out [T, H D] = softmax(q k^T scale) v over each sequence's cached context, causal, windowed, grouped.

A token's context is cut at multiples of CHUNK positions. Each chunk gives, per head, the largest score m, the sum l of
e^(score - m) and the weighted sum of v; chunks are merged in ascending order with the online softmax (Milakov &
Gimelshein 2018; FlashAttention, Dao 2022). A few tokens split their chunks over the threads and merge afterwards, else
a thread merges as it goes: the same operations in the same order, so the result depends neither on threads nor on what
else is in the batch.

qkv [T, (H + 2 KV) D] float32 (only q is read), cache [B, KV, block_size, D] float32 or float16. The G = H / KV query
heads of a KV head share the reads of k and v. Bytes moved: k and v of every token's context, once a KV head.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from numba_engine.backends.cpu.compilation import inner, kernel_address, launcher
from numba_engine.backends.cpu.intrinsics import (
    LANES,
    Emitter,
    RowFolder,
    emit,
    f16,
    f32,
    i64,
    load_f64,
    load_i32,
    load_i64,
    stack_bytes,
    store_f64,
    store_i64,
    vf32,
)
from numba_engine.backends.cpu.thread_team import ARGS, run

CHUNK = 64
_SCORE_HEADS = 4  # heads that share a read of k
_VECTOR_BUDGET = 24  # accumulators of v kept in registers at once

(_OUT, _QKV, _ROW, _K, _V, _CU_SEQLENS, _CONTEXT_LENS, _BLOCK_TABLES, _MAX_BLOCKS, _NUM_SEQS, _KV, _BLOCK_SHIFT,
 _WINDOW, _SCALE, _PARTIALS, _CHUNKS, _PREFETCH) = range(17)  # fmt: skip


@launcher
def attention(
    team: np.ndarray, whole_kernel: int, split_kernel: int, merge_kernel: int, out: np.ndarray, qkv: np.ndarray,
    k: np.ndarray, v: np.ndarray, cu_seqlens_q: np.ndarray, context_lens: np.ndarray, block_tables: np.ndarray,
    max_context_len: int, window: int, scale: float, partials: np.ndarray,
) -> None:  # fmt: skip
    """``window`` 0 for none. ``partials``: scratch, float32, of any size: the split is used where it fits."""
    num_kv_heads = k.shape[1]
    num_items = out.shape[0] * num_kv_heads
    team[ARGS + _OUT] = out.ctypes.data
    team[ARGS + _QKV] = qkv.ctypes.data
    team[ARGS + _ROW] = qkv.shape[1]
    team[ARGS + _K] = k.ctypes.data
    team[ARGS + _V] = v.ctypes.data
    team[ARGS + _CU_SEQLENS] = cu_seqlens_q.ctypes.data
    team[ARGS + _CONTEXT_LENS] = context_lens.ctypes.data
    team[ARGS + _BLOCK_TABLES] = block_tables.ctypes.data
    team[ARGS + _MAX_BLOCKS] = block_tables.shape[1]
    team[ARGS + _NUM_SEQS] = context_lens.size
    team[ARGS + _KV] = num_kv_heads
    block_shift = 0
    while 1 << block_shift < k.shape[2]:
        block_shift += 1
    team[ARGS + _BLOCK_SHIFT] = block_shift
    team[ARGS + _WINDOW] = window
    store_f64(team.ctypes.data, ARGS + _SCALE, scale)
    team[ARGS + _PARTIALS] = partials.ctypes.data
    chunks = (max_context_len + CHUNK - 1) // CHUNK
    team[ARGS + _CHUNKS] = chunks
    team[ARGS + _PREFETCH] = 1 if out.shape[0] == context_lens.size else 0  # a prompt's keys stay in cache
    group = out.shape[1] // (num_kv_heads * k.shape[3])
    if num_items < 16 and chunks > 1 and num_items * chunks * group * partial_floats(k.shape[3]) <= partials.size:
        run(team, split_kernel, num_items * chunks, 1)
        run(team, merge_kernel, num_items, num_items)
    else:
        run(team, whole_kernel, num_items, 1)


@inner
def partial_floats(d: int) -> int:
    """float32s of one head's partial result: the weighted sum [D], then m, then l, padded to 64 bytes."""
    return (d + 2 + 15) // 16 * 16


@functools.cache
def attention_kernels(head_dim: int, group_size: int, is_f16: bool) -> tuple[int, int, int]:
    """Addresses of the kernels: whole contexts, one chunk each, merge of chunks."""
    attend = _attend_chunk(head_dim, group_size, is_f16)
    merge = _merge(head_dim, group_size)
    finish = _finish(head_dim, group_size)
    element_bytes = 2 if is_f16 else 4
    partial_bytes = int(partial_floats.py_func(head_dim)) * 4 * group_size

    offset_place, partial_place = stack_bytes(2 * CHUNK // 8 * 8), stack_bytes(partial_bytes)

    @inner
    def attend_chunk(
        args: int, t: int, kv_head: int, s: int, first: int, low: int, high: int, last: int, out: int
    ) -> None:
        """Positions low … high, all within the chunk that begins at ``first``, of token t, into the partials at out.

        ``last`` is where the token's context ends.
        """
        shift, num_kv_heads = load_i64(args, _BLOCK_SHIFT), load_i64(args, _KV)
        table = load_i64(args, _BLOCK_TABLES) + s * load_i64(args, _MAX_BLOCKS) * 4
        offsets = offset_place(0)
        for octet in range(2 * CHUNK // 8):  # the next chunk's too, for prefetching
            # An octet outside of what is visible may have no block: read one inside, to no effect.
            position = max(low & ~7, min(first + 8 * octet, (last - 1) & ~7))
            block = np.int64(load_i32(table, position >> shift))
            slot = ((block * num_kv_heads + kv_head) << shift) + (position & ((1 << shift) - 1))
            store_i64(offsets, octet, slot * head_dim * element_bytes)
        q = load_i64(args, _QKV) + (t * load_i64(args, _ROW) + kv_head * group_size * head_dim) * 4
        scale = np.float32(load_f64(args, _SCALE))
        k, v = load_i64(args, _K), load_i64(args, _V)
        attend(q, k, v, offsets, low - first, high - first, scale, load_i64(args, _PREFETCH), out)

    @inner
    def sequence_of(args: int, t: int) -> int:
        cu_seqlens = load_i64(args, _CU_SEQLENS)
        low, high = 0, load_i64(args, _NUM_SEQS) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if load_i32(cu_seqlens, middle) <= t:
                low = middle
            else:
                high = middle - 1
        return low

    @inner
    def visible(args: int, t: int, s: int) -> Any:
        """First and one past the last position that token t sees."""
        behind = np.int64(load_i32(load_i64(args, _CU_SEQLENS), s + 1)) - t
        end = np.int64(load_i32(load_i64(args, _CONTEXT_LENS), s)) - behind + 1
        window = load_i64(args, _WINDOW)
        return (max(0, end - window) if window else 0), end

    def attention_whole(begin: int, end: int, args: int) -> None:
        num_kv_heads = load_i64(args, _KV)
        total = partial_place(0)
        part = partial_place(0)
        for item in range(begin, end):
            t, kv_head = item // num_kv_heads, item % num_kv_heads
            s = sequence_of(args, t)
            first, last = visible(args, t, s)
            chunk = first // CHUNK
            attend_chunk(args, t, kv_head, s, chunk * CHUNK, first, min(last, (chunk + 1) * CHUNK), last, total)
            for c in range(chunk + 1, (last + CHUNK - 1) // CHUNK):
                attend_chunk(args, t, kv_head, s, c * CHUNK, c * CHUNK, min(last, (c + 1) * CHUNK), last, part)
                merge(total, part)
            finish(load_i64(args, _OUT) + item * group_size * head_dim * 4, total)

    def attention_split(begin: int, end: int, args: int) -> None:
        num_kv_heads, chunks = load_i64(args, _KV), load_i64(args, _CHUNKS)
        for piece in range(begin, end):
            item, c = piece // chunks, piece % chunks
            t, kv_head = item // num_kv_heads, item % num_kv_heads
            s = sequence_of(args, t)
            first, last = visible(args, t, s)
            low, high = max(first, c * CHUNK), min(last, (c + 1) * CHUNK)
            if low < high:
                to = load_i64(args, _PARTIALS) + piece * partial_bytes
                attend_chunk(args, t, kv_head, s, c * CHUNK, low, high, last, to)

    def attention_merge(begin: int, end: int, args: int) -> None:
        num_kv_heads, chunks = load_i64(args, _KV), load_i64(args, _CHUNKS)
        for item in range(begin, end):
            t = item // num_kv_heads
            s = sequence_of(args, t)
            first, last = visible(args, t, s)
            parts = load_i64(args, _PARTIALS) + item * chunks * partial_bytes
            chunk = first // CHUNK
            total = parts + chunk * partial_bytes
            for c in range(chunk + 1, (last + CHUNK - 1) // CHUNK):
                merge(total, parts + c * partial_bytes)
            finish(load_i64(args, _OUT) + item * group_size * head_dim * 4, total)

    variant = f"d{head_dim}-g{group_size}-{'f16' if is_f16 else 'f32'}"
    whole, split, merged = (
        kernel_address(f, "void(int64, int64, int64)", variant)
        for f in (attention_whole, attention_split, attention_merge)
    )
    return whole, split, merged


class _Head:
    """Vectors of a head of D values: D // 16 whole ones and perhaps a shorter last."""

    def __init__(self, e: Emitter, head_dim: int) -> None:
        self.e = e
        self.widths = [LANES] * (head_dim // LANES) + ([head_dim % LANES] if head_dim % LANES else [])

    def load(self, address: ir.Value, i: int, element: ir.Type) -> ir.Value:
        """Vector i widened to 16 lanes of float32, zeros behind the head's end."""
        e, width = self.e, self.widths[i]
        size = 2 if element is f16 else 4
        value = e.load(e.at(address, i * LANES * size), ir.VectorType(element, width), size)
        if element is f16:
            value = e.b.fpext(value, ir.VectorType(f32, width))
        if width < LANES:
            zeros = ir.Constant(ir.VectorType(f32, width), None)
            value = e.shuffle(value, zeros, [*range(width), *[width] * (LANES - width)])
        return value

    def store(self, value: ir.Value, address: ir.Value, i: int) -> None:
        e, width = self.e, self.widths[i]
        if width < LANES:
            value = e.shuffle(value, value, list(range(width)))
        e.store(value, e.at(address, i * LANES * 4), 4)


def _attend_chunk(head_dim: int, group_size: int, is_f16: bool) -> Any:
    """Intrinsic: keys low … high of a chunk, for the G heads at q, into G partials at out.

    The chunk's keys are in octets at byte offsets from k and v, so that a block may be as small as 8.
    """
    element = f16 if is_f16 else f32
    row_bytes = head_dim * (2 if is_f16 else 4)
    stride = int(partial_floats.py_func(head_dim)) * 4
    num_tiles = CHUNK // LANES

    def body(
        b: ir.IRBuilder, q: ir.Value, k: ir.Value, v: ir.Value, offsets: ir.Value, low: ir.Value, high: ir.Value,
        scale: ir.Value, prefetch: ir.Value, out: ir.Value,
    ) -> None:  # fmt: skip
        e = Emitter(b)
        head = _Head(e, head_dim)
        vectors = range(len(head.widths))
        weights = b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(vf32, group_size * num_tiles)), i64)
        minus_infinity = e.const(vf32, float("-inf"))
        first_tile = b.lshr(low, e.integer(4))
        tiles = b.sub(b.lshr(b.add(high, e.integer(LANES - 1)), e.integer(4)), first_tile)

        with e.loop(tiles) as i:
            tile = b.add(first_tile, i)
            with b.if_then(b.icmp_signed("!=", prefetch, e.integer(0))):
                for half in range(2):
                    here = e.at(e.at(offsets, tile, 16), 8 * half)
                    e.prefetch(e.at(v, e.load(here, i64, 8)), 8 * row_bytes)
                    e.prefetch(e.at(k, e.load(e.at(here, CHUNK), i64, 8)), 8 * row_bytes)
            before = e.first_lanes(b.sub(low, b.shl(tile, e.integer(4))))
            valid = b.and_(e.first_lanes(b.sub(high, b.shl(tile, e.integer(4)))), b.not_(before))
            for heads in _split(group_size, _SCORE_HEADS):
                folders = {g: RowFolder(e) for g in heads}
                for half in range(2):
                    keys = e.at(k, e.load(e.at(e.at(offsets, tile, 16), 8 * half), i64, 8))
                    for j in range(8):
                        sums: dict[int, ir.Value] = {}
                        for n in vectors:
                            key = head.load(e.at(keys, j * row_bytes), n, element)
                            for g in heads:
                                query = head.load(e.at(q, g * head_dim * 4), n, f32)
                                sums[g] = e.fma(query, key, sums[g]) if n else b.fmul(query, key)
                        for g in heads:
                            folders[g].push(sums[g])
                for g in heads:
                    scores = folders[g].sums()
                    scores = b.select(valid, b.fmul(scores, e.splat(scale)), minus_infinity)
                    e.store(scores, e.at(e.at(weights, g * CHUNK * 4), tile, LANES * 4), 64)

        for g in range(group_size):
            head_weights = e.at(weights, g * CHUNK * 4)
            largest, sums_place = cgutils.alloca_once(b, vf32), cgutils.alloca_once(b, vf32)
            b.store(minus_infinity, largest)
            b.store(ir.Constant(vf32, None), sums_place)
            with e.loop(tiles) as i:
                scores = e.load(e.at(head_weights, b.add(first_tile, i), LANES * 4), vf32, 64)
                b.store(e.maximum(scores, b.load(largest)), largest)
            m = e.reduce(b.load(largest), e.maximum)
            with e.loop(tiles) as i:
                place = e.at(head_weights, b.add(first_tile, i), LANES * 4)
                p = e.exp(b.fsub(e.load(place, vf32, 64), e.splat(m)))
                e.store(p, place, 64)
                b.store(b.fadd(b.load(sums_place), p), sums_place)
            partial = e.at(out, g * stride)
            e.store(m, e.at(partial, head_dim * 4), 4)
            e.store(e.reduce(b.load(sums_place), b.fadd), e.at(partial, head_dim * 4 + 4), 4)

        for heads in _split(group_size, max(1, _VECTOR_BUDGET // len(head.widths))):
            places = {(g, n): cgutils.alloca_once(b, vf32) for g in heads for n in vectors}
            for place in places.values():
                b.store(ir.Constant(vf32, None), place)
            with e.loop(b.sub(high, low)) as i:
                j = b.add(low, i)
                octet = e.load(e.at(offsets, b.lshr(j, e.integer(3)), 8), i64, 8)
                value = e.at(e.at(v, octet), b.and_(j, e.integer(7)), row_bytes)
                ps = {g: e.splat(e.load(e.at(e.at(weights, g * CHUNK * 4), j, 4), f32, 4)) for g in heads}
                for n in vectors:
                    vector = head.load(value, n, element)
                    for g in heads:
                        b.store(e.fma(ps[g], vector, b.load(places[g, n])), places[g, n])
            for (g, n), place in places.items():
                head.store(b.load(place), e.at(out, g * stride), n)

    return emit("attend_chunk", types.void, 9, body)


def _split(count: int, most: int) -> list[range]:
    """0 … count in runs of at most ``most``."""
    return [range(first, min(first + most, count)) for first in range(0, count, most)]


def _merge(head_dim: int, group_size: int) -> Any:
    """Intrinsic: the G partials at ``total`` become those of both; ``part`` covers the later positions."""
    stride = int(partial_floats.py_func(head_dim)) * 4

    def body(b: ir.IRBuilder, total: ir.Value, part: ir.Value) -> None:
        e = Emitter(b)
        head = _Head(e, head_dim)
        with e.loop(e.integer(group_size)) as g:
            old, new = e.at(total, g, stride), e.at(part, g, stride)
            old_m, new_m = (e.load(e.at(a, head_dim * 4), f32, 4) for a in (old, new))
            old_l, new_l = (e.load(e.at(a, head_dim * 4 + 4), f32, 4) for a in (old, new))
            m = e.binary("maxnum", old_m, new_m)
            old_scale, new_scale = (e.exp(b.fsub(a, m)) for a in (old_m, new_m))
            e.store(m, e.at(old, head_dim * 4), 4)
            e.store(e.fma(old_l, old_scale, b.fmul(new_l, new_scale)), e.at(old, head_dim * 4 + 4), 4)
            old_scale, new_scale = e.splat(old_scale), e.splat(new_scale)
            for i in range(len(head.widths)):
                scaled = b.fmul(head.load(new, i, f32), new_scale)
                head.store(e.fma(head.load(old, i, f32), old_scale, scaled), old, i)

    return emit("merge_partials", types.void, 2, body)


def _finish(head_dim: int, group_size: int) -> Any:
    """Intrinsic: the G partials, each weighted sum divided by its l, to out [G, D]."""
    stride = int(partial_floats.py_func(head_dim)) * 4

    def body(b: ir.IRBuilder, out: ir.Value, total: ir.Value) -> None:
        e = Emitter(b)
        head = _Head(e, head_dim)
        with e.loop(e.integer(group_size)) as g:
            partial = e.at(total, g, stride)
            inverse = e.splat(b.fdiv(e.const(f32, 1.0), e.load(e.at(partial, head_dim * 4 + 4), f32, 4)))
            for i in range(len(head.widths)):
                head.store(b.fmul(head.load(partial, i, f32), inverse), e.at(out, g, head_dim * 4), i)

    return emit("finish_attention", types.void, 2, body)
