"""attention: out [T, H D] = softmax(q k^T scale) v over each sequence's cached context, causal, windowed, grouped.

Scores s are softcap * tanh(s / softcap) before softmax where there is a softcap.

A token's context is cut at multiples of CHUNK positions. Each chunk gives, per head, the largest score m, the sum l of
e^(score - m) and the weighted sum of v; chunks are merged in ascending order with the online softmax (Milakov &
Gimelshein 2018; FlashAttention, Dao 2022). A few tokens split their chunks over the threads and merge afterwards, else
a thread merges as it goes. Neighbouring tokens of a prompt share each chunk, which is then widened and its keys are
transposed first (512 tokens: 20 % less time, after 3584 others: 27 %). All do the same operations on a value in the
same order, so the result depends neither on threads nor on what else is in the batch.

qkv [T, (H + 2 KV) D] float32 (only q is read), cache [B, KV, block_size, D] float32 or float16. The G = H / KV query
heads of a KV head share the reads of k and v. Bytes moved: k and v of every token's context, once a KV head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.compilation import inner, kernel_address
from numba_engine.backends.cpu.intrinsics import (
    LANES,
    Emitter,
    RowFolder,
    call_kernel,
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
from numba_engine.backends.layers import Attention

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

CHUNK = 64
_SCORE_HEADS = 4  # heads that share a read of k
_PROMPT_TILE_ROWS = 96  # heads times tokens
_LEAST_PROMPT_TOKENS = 4
_PACKED_SCORE_HEADS, _SCORE_TILES = 3, 2  # heads that share a read of packed k, and 16s of keys a read of q
_VECTOR_BUDGET = 24  # accumulators of v kept in registers at once

(_OUT, _QKV, _ROW, _K, _V, _CU_SEQLENS, _CONTEXT_LENS, _BLOCK_TABLES, _MAX_BLOCKS, _NUM_SEQS, _KV, _BLOCK_SHIFT,
 _WINDOW, _SCALE, _PARTIALS, _CHUNKS, _PREFETCH, _NUM_TOKENS, _WHOLE_KERNEL) = range(19)  # fmt: skip


def launch(backend: CpuBackend, out: Array, qkv: Array, cache: KVCacheLayer, batch: Batch, shape: Attention) -> None:
    _, num_kv_heads, block_size, head_dim = cache.k.shape
    kernels = attention_kernels(head_dim, shape.group_size, cache.k.dtype.itemsize == 2, shape.softcap)
    partials = backend.partials
    backend.call(
        attention, *kernels, out, qkv, qkv.shape[1], *backend.cache_words(cache),
        num_kv_heads, block_size.bit_length() - 1, head_dim, shape.group_size, batch.cu_seqlens_q,
        batch.context_lens, *batch.block_tables.shape, batch.block_tables, shape.window or 0,
        shape.scale, partials, partials.size,
    )  # fmt: skip


@Command
def attention(
    team: np.ndarray, whole_kernel: int, split_kernel: int, merge_kernel: int, prompt_kernel: int,
    out: int, qkv: int, row: int, k: int, v: int, num_kv_heads: int, block_shift: int, d: int, group: int,
    cu_seqlens_q: int, context_lens: int, num_seqs: int, max_blocks: int, block_tables: int, window: int, scale: float,
    partials: int, num_partials: int,
) -> None:  # fmt: skip
    """``window`` 0 for none. ``partials``: scratch, float32, of any size: the split is used where it fits.

    Rows behind the last sequence's are padding, and left alone.
    """
    num_tokens = np.int64(load_i32(cu_seqlens_q, num_seqs))
    longest = np.int64(0)
    for s in range(num_seqs):
        longest = max(longest, np.int64(load_i32(context_lens, s)))
    chunks = (longest + CHUNK - 1) // CHUNK
    num_items = num_tokens * num_kv_heads
    team[ARGS + _OUT] = out
    team[ARGS + _QKV] = qkv
    team[ARGS + _ROW] = row
    team[ARGS + _K] = k
    team[ARGS + _V] = v
    team[ARGS + _CU_SEQLENS] = cu_seqlens_q
    team[ARGS + _CONTEXT_LENS] = context_lens
    team[ARGS + _BLOCK_TABLES] = block_tables
    team[ARGS + _MAX_BLOCKS] = max_blocks
    team[ARGS + _NUM_SEQS] = num_seqs
    team[ARGS + _KV] = num_kv_heads
    team[ARGS + _BLOCK_SHIFT] = block_shift
    team[ARGS + _WINDOW] = window
    store_f64(team.ctypes.data, ARGS + _SCALE, scale)
    team[ARGS + _PARTIALS] = partials
    team[ARGS + _CHUNKS] = chunks
    team[ARGS + _PREFETCH] = num_tokens <= num_seqs  # a prompt's keys stay in cache
    team[ARGS + _NUM_TOKENS] = num_tokens
    team[ARGS + _WHOLE_KERNEL] = whole_kernel
    if num_items < 16 and chunks > 1 and num_items * chunks * group * partial_floats(d) <= num_partials:
        run(team, split_kernel, num_items * chunks, 1)
        run(team, merge_kernel, num_items, num_items)
    elif num_tokens > num_seqs:
        tile_tokens = prompt_tile_tokens(group)
        run(team, prompt_kernel, (num_tokens + tile_tokens - 1) // tile_tokens * num_kv_heads, 1)
    else:
        run(team, whole_kernel, num_items, 1)


@inner
def partial_floats(d: int) -> int:
    """float32s of one head's partial result: the weighted sum [D], then m, then l, padded to 64 bytes."""
    return (d + 2 + 15) // 16 * 16


@inner
def prompt_tile_tokens(group_size: int) -> int:
    """Neighbouring tokens of a prompt that share the packing of a chunk's keys and values."""
    return max(_PROMPT_TILE_ROWS // group_size, _LEAST_PROMPT_TOKENS)


@functools.cache
def attention_kernels(head_dim: int, group_size: int, is_f16: bool, softcap: float | None) -> tuple[int, int, int, int]:
    """Addresses of the kernels: whole contexts, one chunk each, merge of chunks, whole contexts of prompts."""
    pack_chunk = _pack_chunk(head_dim, is_f16)
    packed_scores, weigh_packed = _packed_scores(head_dim, group_size, softcap), _weigh_packed(head_dim, group_size)
    exponentials = _exponentials_of(head_dim, group_size)
    attend = _attend_chunk(head_dim, group_size, is_f16, softcap)
    merge = _merge(head_dim, group_size)
    finish = _finish(head_dim, group_size)
    element_bytes = 2 if is_f16 else 4
    partial_bytes = int(partial_floats.py_func(head_dim)) * 4 * group_size

    offset_place, partial_place = stack_bytes(2 * CHUNK // 8 * 8), stack_bytes(partial_bytes)
    padded_dim = -(-head_dim // LANES) * LANES
    tile_tokens = int(prompt_tile_tokens.py_func(group_size))
    packed_place, weights_place, totals_place, parts_place = (
        stack_bytes(size)
        for size in (
            2 * CHUNK * padded_dim * 4,
            tile_tokens * group_size * CHUNK * 4,
            tile_tokens * partial_bytes,
            tile_tokens * partial_bytes,
        )
    )

    @inner
    def find_octets(args: int, kv_head: int, s: int, first: int, low: int, last: int, count: int, offsets: int) -> None:
        """Byte offsets of the octets of positions first, first + 8, …; positions low … last are visible."""
        shift, num_kv_heads = load_i64(args, _BLOCK_SHIFT), load_i64(args, _KV)
        table = load_i64(args, _BLOCK_TABLES) + s * load_i64(args, _MAX_BLOCKS) * 4
        for octet in range(count):
            # An octet outside of what is visible may have no block: read one inside, to no effect.
            position = max(low & ~7, min(first + 8 * octet, (last - 1) & ~7))
            block = np.int64(load_i32(table, position >> shift))
            slot = ((block * num_kv_heads + kv_head) << shift) + (position & ((1 << shift) - 1))
            store_i64(offsets, octet, slot * head_dim * element_bytes)

    @inner
    def query(args: int, t: int, kv_head: int) -> int:
        return load_i64(args, _QKV) + (t * load_i64(args, _ROW) + kv_head * group_size * head_dim) * 4

    @inner
    def attend_chunk(
        args: int, t: int, kv_head: int, s: int, first: int, low: int, high: int, last: int, out: int
    ) -> None:
        """Positions low … high, all within the chunk that begins at ``first``, of token t, into the partials at out.

        ``last`` is where the token's context ends.
        """
        offsets = offset_place(0)
        find_octets(args, kv_head, s, first, low, last, 2 * CHUNK // 8, offsets)  # the next chunk's too, to prefetch
        scale = np.float32(load_f64(args, _SCALE))
        k, v = load_i64(args, _K), load_i64(args, _V)
        prefetch = load_i64(args, _PREFETCH)
        attend(query(args, t, kv_head), k, v, offsets, low - first, high - first, scale, prefetch, out)

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
        total, part = partial_place(0), partial_place(0)
        for item in range(begin, end):
            t, kv_head = item // num_kv_heads, item % num_kv_heads
            s = sequence_of(args, t)
            first, last = visible(args, t, s)
            for c in range(first // CHUNK, (last + CHUNK - 1) // CHUNK):
                is_first = c == first // CHUNK
                low, high = max(first, c * CHUNK), min(last, (c + 1) * CHUNK)
                attend_chunk(args, t, kv_head, s, c * CHUNK, low, high, last, total if is_first else part)
                if not is_first:
                    merge(total, part)
            finish(output(args, t, kv_head), total)

    def attention_prompt(begin: int, end: int, args: int) -> None:
        num_kv_heads = load_i64(args, _KV)
        for item in range(begin, end):
            t, kv_head = item // num_kv_heads * tile_tokens, item % num_kv_heads
            tile_end = min(t + tile_tokens, load_i64(args, _NUM_TOKENS))
            while t < tile_end:
                s = sequence_of(args, t)
                stop = min(tile_end, np.int64(load_i32(load_i64(args, _CU_SEQLENS), s + 1)))
                if stop - t < _LEAST_PROMPT_TOKENS:
                    for alone in range(t, stop):
                        one = alone * num_kv_heads + kv_head
                        call_kernel(load_i64(args, _WHOLE_KERNEL), one, one + 1, args)
                else:
                    attend_tile(args, t, stop, s, kv_head)
                t = stop

    @inner
    def attend_tile(args: int, begin: int, end: int, s: int, kv_head: int) -> None:
        """Tokens begin … end of sequence s: a chunk is packed once for all of them.

        Each step is done for all tokens before the next one, as neighbours then overlap where one alone would wait.
        """
        offsets, packed, weights = offset_place(0), packed_place(0), weights_place(0)
        totals, parts = totals_place(0), parts_place(0)
        scale = np.float32(load_f64(args, _SCALE))
        lowest, highest = visible(args, begin, s)[0], visible(args, end - 1, s)[1]
        for c in range(lowest // CHUNK, (highest + CHUNK - 1) // CHUNK):
            low, high = max(lowest, c * CHUNK), min(highest, (c + 1) * CHUNK)
            find_octets(args, kv_head, s, c * CHUNK, low, high, CHUNK // 8, offsets)
            pack_chunk(load_i64(args, _K), load_i64(args, _V), offsets, packed)
            for step in range(3):
                for t in range(begin, end):
                    first, last = visible(args, t, s)
                    low, high = max(first - c * CHUNK, 0), min(last - c * CHUNK, CHUNK)
                    if low >= high:
                        continue
                    is_first = c == first // CHUNK
                    at = (t - begin) * partial_bytes
                    to = (totals if is_first else parts) + at
                    of_token = weights + (t - begin) * 4 * CHUNK * group_size
                    if step == 0:
                        packed_scores(query(args, t, kv_head), packed, low, high, scale, of_token)
                    elif step == 1:
                        exponentials(of_token, low, high, to)
                    else:
                        weigh_packed(packed, of_token, low, high, to)
                        if not is_first:
                            merge(totals + at, to)
        for t in range(begin, end):
            finish(output(args, t, kv_head), totals + (t - begin) * partial_bytes)

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
            t, kv_head = item // num_kv_heads, item % num_kv_heads
            s = sequence_of(args, t)
            first, last = visible(args, t, s)
            parts = load_i64(args, _PARTIALS) + item * chunks * partial_bytes
            chunk = first // CHUNK
            total = parts + chunk * partial_bytes
            for c in range(chunk + 1, (last + CHUNK - 1) // CHUNK):
                merge(total, parts + c * partial_bytes)
            finish(output(args, t, kv_head), total)

    @inner
    def output(args: int, t: int, kv_head: int) -> int:
        return load_i64(args, _OUT) + (t * load_i64(args, _KV) + kv_head) * group_size * head_dim * 4

    variant = f"d{head_dim}-g{group_size}-{'f16' if is_f16 else 'f32'}" + ("" if softcap is None else f"-c{softcap}")
    whole, split, merged, prompt = (
        kernel_address(f, "void(int64, int64, int64)", variant)
        for f in (attention_whole, attention_split, attention_merge, attention_prompt)
    )
    return whole, split, merged, prompt


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


def _attend_chunk(head_dim: int, group_size: int, is_f16: bool, softcap: float | None) -> Any:
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
        first_tile = b.lshr(low, e.integer(4))
        tiles = b.sub(b.lshr(b.add(high, e.integer(LANES - 1)), e.integer(4)), first_tile)

        with e.loop(tiles) as i:
            tile = b.add(first_tile, i)
            with b.if_then(b.icmp_signed("!=", prefetch, e.integer(0))):
                for half in range(2):
                    here = e.at(e.at(offsets, tile, 16), 8 * half)
                    e.prefetch(e.at(v, e.load(here, i64, 8)), 8 * row_bytes)
                    e.prefetch(e.at(k, e.load(e.at(here, CHUNK), i64, 8)), 8 * row_bytes)
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
                    scores = _capped(e, b.fmul(folders[g].sums(), e.splat(scale)), softcap)
                    e.store(scores, e.at(e.at(weights, g * CHUNK * 4), tile, LANES * 4), 64)

        _exponentials(e, weights, group_size, low, high, e.at(out, head_dim * 4), stride)

        def value_at(j: ir.Value) -> ir.Value:
            octet = e.load(e.at(offsets, b.lshr(j, e.integer(3)), 8), i64, 8)
            return e.at(e.at(v, octet), b.and_(j, e.integer(7)), row_bytes)

        _weigh(e, head, element, group_size, weights, value_at, low, high, out, stride)

    return emit("attend_chunk", types.void, 9, body)


def _capped(e: Emitter, scores: ir.Value, softcap: float | None) -> ir.Value:
    return scores if softcap is None else e.soft_capped(scores, e.const(scores.type, softcap))


def _exponentials(
    e: Emitter, weights: ir.Value, group_size: int, low: ir.Value, high: ir.Value, out: ir.Value, stride: int
) -> None:
    """The scores of G heads [G, CHUNK] become e^(score - m), 0 outside low … high; m and the sum go to ``out``.

    Without a loop over a head's scores, so that they need not wait for each other.
    """
    b = e.b
    valid = []
    for tile in range(CHUNK // LANES):
        before, upto = (e.first_lanes(b.sub(end, e.integer(tile * LANES))) for end in (low, high))
        valid.append(b.and_(upto, b.not_(before)))
    with e.loop(e.integer(group_size)) as g:
        places = [e.at(e.at(weights, tile * LANES * 4), g, CHUNK * 4) for tile in range(len(valid))]
        scores = [
            b.select(mask, e.load(place, vf32, 64), e.const(vf32, float("-inf")))
            for mask, place in zip(valid, places, strict=True)
        ]
        m = e.reduce(functools.reduce(e.maximum, scores), e.maximum)
        ps = [e.exp(b.fsub(score, e.splat(m))) for score in scores]
        for p, place in zip(ps, places, strict=True):
            e.store(p, place, 64)
        partial = e.at(out, g, stride)
        e.store(m, partial, 4)
        e.store(e.reduce(functools.reduce(b.fadd, ps), b.fadd), e.at(partial, 4), 4)


def _weigh(
    e: Emitter, head: _Head, element: ir.Type, group_size: int, weights: ir.Value,
    value_at: Callable[[ir.Value], ir.Value], low: ir.Value, high: ir.Value, out: ir.Value, stride: int,
) -> None:  # fmt: skip
    """Weighted sums of the values low … high for G heads, to ``out``."""
    b = e.b
    vectors = range(len(head.widths))
    for heads in _split(group_size, max(1, _VECTOR_BUDGET // len(head.widths))):
        places = {(g, n): cgutils.alloca_once(b, vf32) for g in heads for n in vectors}
        for place in places.values():
            b.store(ir.Constant(vf32, None), place)
        with e.loop(b.sub(high, low)) as i:
            j = b.add(low, i)
            value = value_at(j)
            ps = {g: e.splat(e.load(e.at(e.at(weights, g * CHUNK * 4), j, 4), f32, 4)) for g in heads}
            for n in vectors:
                vector = head.load(value, n, element)
                for g in heads:
                    b.store(e.fma(ps[g], vector, b.load(places[g, n])), places[g, n])
        for (g, n), place in places.items():
            head.store(b.load(place), e.at(out, g * stride), n)


def _pack_chunk(head_dim: int, is_f16: bool) -> Any:
    """Intrinsic: keys and values of a chunk, in octets at byte offsets from k and v, to ``packed`` as float32.

    Keys become [D][CHUNK], then values [CHUNK][D], D padded with zeros to whole vectors.
    """
    element = f16 if is_f16 else f32
    row_bytes = head_dim * (2 if is_f16 else 4)

    def body(b: ir.IRBuilder, k: ir.Value, v: ir.Value, offsets: ir.Value, packed: ir.Value) -> None:
        e = Emitter(b)
        head = _Head(e, head_dim)
        count = len(head.widths)
        values = e.at(packed, count * LANES * CHUNK * 4)
        with e.loop(e.integer(CHUNK // 8)) as octet:
            from_v = e.at(v, e.load(e.at(offsets, octet, 8), i64, 8))
            to = e.at(values, octet, 8 * count * LANES * 4)
            for j in range(8):
                for n in range(count):
                    place = e.at(to, (j * count + n) * LANES * 4)
                    e.store(head.load(e.at(from_v, j * row_bytes), n, element), place, 64)
        with e.loop(e.integer(CHUNK // LANES)) as tile:
            octets = [e.load(e.at(e.at(offsets, tile, 16), 8 * half), i64, 8) for half in range(2)]
            for n in range(count):
                rows = [
                    head.load(e.at(e.at(k, octet), j * row_bytes), n, element) for octet in octets for j in range(8)
                ]
                for lane, column in enumerate(_transposed(e, rows)):
                    e.store(column, e.at(e.at(packed, (n * LANES + lane) * CHUNK * 4), tile, LANES * 4), 64)

    return emit("pack_chunk", types.void, 4, body)


def _transposed(e: Emitter, rows: list[ir.Value]) -> list[ir.Value]:
    for step in (8, 4, 2, 1):
        new = list(rows)
        for i in range(LANES):
            if not i & step:
                upper, lower = rows[i], rows[i + step]
                new[i] = e.shuffle(upper, lower, [x if not x & step else LANES + x - step for x in range(LANES)])
                new[i + step] = e.shuffle(upper, lower, [x + step if not x & step else LANES + x for x in range(LANES)])
        rows = new
    return rows


def _packed_scores(head_dim: int, group_size: int, softcap: float | None) -> Any:
    """Intrinsic: scores [G, CHUNK] of a packed chunk's keys low … high and perhaps of more.

    Sums take the same steps as by ``RowFolder``, so they have the same bits.
    """
    num_tiles = CHUNK // LANES

    def body(
        b: ir.IRBuilder, q: ir.Value, packed: ir.Value, low: ir.Value, high: ir.Value, scale: ir.Value, out: ir.Value
    ) -> None:
        e = Emitter(b)
        widths = _Head(e, head_dim).widths
        scales = e.splat(scale)
        per_set = _SCORE_TILES * LANES
        first_set = b.udiv(low, e.integer(per_set))
        end_set = b.udiv(b.add(high, e.integer(per_set - 1)), e.integer(per_set))
        with e.loop(b.sub(end_set, first_set)) as i:
            offset = b.mul(b.add(first_set, i), e.integer(per_set * 4))
            keys = b.add(packed, offset)
            for heads in _split(group_size, _PACKED_SCORE_HEADS):

                def products(lane: int, heads: range, keys: ir.Value) -> list[ir.Value]:
                    """The sums over every 16th value from ``lane`` on, for each head and tile."""
                    sums = [ir.Constant(vf32, None)] * (len(heads) * _SCORE_TILES)
                    for n, width in enumerate(widths):
                        if lane >= width:
                            continue
                        d = n * LANES + lane
                        columns = [
                            e.load(e.at(keys, (d * num_tiles + tile) * LANES * 4), vf32, 64)
                            for tile in range(_SCORE_TILES)
                        ]
                        queries = [e.splat(e.load(e.at(q, (g * head_dim + d) * 4), f32, 4)) for g in heads]
                        pairs = [(query, column) for query in queries for column in columns]
                        sums = [
                            e.fma(query, column, total) if n else b.fmul(query, column)
                            for (query, column), total in zip(pairs, sums, strict=True)
                        ]
                    return sums

                def folded(lane: int, step: int, heads: range, keys: ir.Value) -> list[ir.Value]:
                    if step == LANES:
                        return products(lane, heads, keys)
                    halves = (folded(first, 2 * step, heads, keys) for first in (lane, lane + step))
                    return [b.fadd(x, y) for x, y in zip(*halves, strict=True)]

                places = [(g, tile) for g in heads for tile in range(_SCORE_TILES)]
                for (g, tile), scores in zip(places, folded(0, 1, heads, keys), strict=True):
                    place = e.at(b.add(out, offset), (g * num_tiles + tile) * LANES * 4)
                    e.store(_capped(e, b.fmul(scores, scales), softcap), place, 64)

    return emit("packed_scores", types.void, 6, body)


def _exponentials_of(head_dim: int, group_size: int) -> Any:
    """Intrinsic: ``_exponentials``, m and sums to the partials at ``out``."""
    stride = int(partial_floats.py_func(head_dim)) * 4

    def body(b: ir.IRBuilder, weights: ir.Value, low: ir.Value, high: ir.Value, out: ir.Value) -> None:
        e = Emitter(b)
        _exponentials(e, weights, group_size, low, high, e.at(out, head_dim * 4), stride)

    return emit("exponentials", types.void, 4, body)


def _weigh_packed(head_dim: int, group_size: int) -> Any:
    """Intrinsic: ``_weigh`` of a packed chunk's values."""
    stride = int(partial_floats.py_func(head_dim)) * 4

    def body(
        b: ir.IRBuilder, packed: ir.Value, weights: ir.Value, low: ir.Value, high: ir.Value, out: ir.Value
    ) -> None:
        e = Emitter(b)
        head = _Head(e, head_dim)
        row_bytes = len(head.widths) * LANES * 4
        values = e.at(packed, CHUNK * row_bytes)
        _weigh(e, head, f32, group_size, weights, lambda j: e.at(values, j, row_bytes), low, high, out, stride)

    return emit("weigh_packed", types.void, 5, body)


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
