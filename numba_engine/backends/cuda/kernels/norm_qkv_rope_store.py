"""norm_qkv_rope_store: RMSNorm(x) → q, k, v → rotation → q to its place, k and v to the cache, in one kernel.

Equal to rms_norm, linear, rope and store_kv, bit by bit, but that the k and v columns of qkv are not written.

Arrays (flat): qkv float32 [num_rows, (H + 2 KV) D], D a multiple of 32; k_cache, v_cache [B, KV, block_size, D],
float32 or half (as uint16 bits); x float32 [num_rows, in_features]; norm_weight float32 [in_features]; weights uint32,
packed, whole heads; bias float32 [(H + 2 KV) D] (read if has_bias); cos, sin float32 [*, D / 2]; positions,
slot_mapping int32 [num_rows], slots below 0 not stored.

A block's two tiles are 16 rows of a head's first half and those that they rotate with, D / 2 further. Normalised while
staged, as ``norm_linear``. Bytes moved: weights once, x and norm_weight a few times a block, q, k, v once.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, uint16, uint32

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer, Weight
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels import norm_linear
from numba_engine.backends.cuda.kernels.intrinsics import float_to_half
from numba_engine.backends.cuda.kernels.packing import TILE_ROWS
from numba_engine.backends.cuda.kernels.rope import rotate
from numba_engine.backends.cuda.kernels.store_kv import head_in_slot, stored
from numba_engine.backends.cuda.kernels.streaming import MIN_BLOCKS, THREADS, ahead_of, stream, stream_grid, tokens_for
from numba_engine.backends.cuda.kernels.unrolling import unroll_into
from numba_engine.backends.layers import Attention, Layer
from numba_engine.formats import Format, label

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend


@cuda.jit(device=True, inline="always")
def _halves(pair, shape):  # type: ignore[no-untyped-def]
    """``shape`` is (tiles of half a head,)."""
    head = uint32(pair // shape[0])
    first = uint32(pair + head * shape[0])
    return first, uint32(first + shape[0])


@cache
def norm_qkv_rope_store_kernel(format: Format, tokens: int, is_half: bool) -> Kernel:
    convert = float_to_half if is_half else float32

    @cuda.jit(device=True, inline="always")
    def finish(arguments, pair, row, token, a, b):  # type: ignore[no-untyped-def]
        outputs, inputs, sizes = arguments
        qkv, k_cache, v_cache = outputs
        bias, cos_table, sin_table, positions, slot_mapping = inputs
        first_head, num_heads, num_kv_heads, half, block_size, has_bias = sizes
        half_tiles = uint32(half >> uint32(4))
        local = uint32(pair // half_tiles)
        head, i = uint32(first_head + local), uint32(uint32(pair - local * half_tiles) * uint32(16) + row)
        column = uint32(head * half * uint32(2) + i)
        if has_bias != uint32(0):
            a += bias[column]
            b += bias[uint32(column + half)]
        if head < uint32(num_heads + num_kv_heads):
            place = uint32(uint32(positions[token]) * half + i)
            a, b = rotate(a, b, cos_table[place], sin_table[place])
        if head < num_heads:
            place = uint32(token * uint32(num_heads + num_kv_heads * uint32(2)) * half * uint32(2) + column)
            qkv[place] = a
            qkv[uint32(place + half)] = b
        elif slot_mapping[token] >= 0:
            slot = uint32(slot_mapping[token])
            is_key = head < uint32(num_heads + num_kv_heads)
            kv_head = uint32(head - num_heads)
            if is_key:
                place = uint32(head_in_slot(slot, kv_head, num_kv_heads, uint32(half * uint32(2)), block_size) + i)
                k_cache[place] = convert(a)
                k_cache[uint32(place + half)] = convert(b)
            else:
                kv_head = uint32(kv_head - num_kv_heads)
                place = uint32(head_in_slot(slot, kv_head, num_kv_heads, uint32(half * uint32(2)), block_size) + i)
                v_cache[place] = convert(a)
                v_cache[uint32(place + half)] = convert(b)

    body = stream(format, tokens, _halves, finish, is_normed=True)

    def norm_qkv_rope_store(  # type: ignore[no-untyped-def]
        qkv, k_cache, v_cache, x, norm_weight, weights, bias, cos, sin, positions, slot_mapping, eps, num_rows,
        in_features, num_pairs, half_tiles, first_head, num_heads, num_kv_heads, half, block_size, has_bias,
        ahead, num_lines,
    ):  # fmt: skip
        return (
            x, (norm_weight, eps), weights, num_rows, in_features, num_pairs, (half_tiles,),
            (
                (qkv, k_cache, v_cache), (bias, cos, sin, positions, slot_mapping),
                (first_head, num_heads, num_kv_heads, half, block_size, has_bias),
            ),
            ahead, num_lines,
        )  # fmt: skip

    cache_type = (uint16 if is_half else float32)[::1]
    outputs = (float32[::1], cache_type, cache_type)
    inputs = (float32[::1], float32[::1], uint32[::1], float32[::1], float32[::1], float32[::1], int32[::1], int32[::1])
    name = f"norm_qkv_rope_store_{label(format)}_{'f16' if is_half else 'f32'}_x{tokens}"
    arguments = (*outputs, *inputs, float32, *[uint32] * 10, uint32[::1], uint32)
    return Kernel(name, unroll_into(norm_qkv_rope_store, body), arguments, THREADS, MIN_BLOCKS)


def supports(
    backend: CudaBackend, qkv: Array, normed: Array, residual: Array, layer: Layer, cache: KVCacheLayer, batch: Batch
) -> bool:
    return norm_linear.fuses_norm(residual.shape[0], layer.qkv_proj)


def launch(
    backend: CudaBackend, qkv: Array, normed: Array, residual: Array, layer: Layer, cache: KVCacheLayer, batch: Batch
) -> None:
    """The k and v columns of ``qkv`` are undefined after it."""
    shape = layer.attention
    if layer.q_norm is None and _whole_halves(layer.qkv_proj, shape):
        _launch_as_one(backend, qkv, residual, layer, cache, batch)
        return
    norm_linear.launch(backend, qkv, residual, layer.attn_norm, layer.qkv_proj, bias=layer.qkv_bias)
    if layer.q_norm is not None and layer.k_norm is not None:
        backend.head_norm(qkv, layer.q_norm, layer.k_norm, shape)
    if shape.rope is not None:
        backend.rope(qkv, batch.positions, shape)
    backend.store_kv(cache, qkv, batch.slot_mapping, shape)


def _whole_halves(weight: Weight, shape: Attention) -> bool:
    """Whether a block can make both halves of a rotation: halves of heads are whole tiles."""
    whole = all(segment.num_rows % shape.head_dim == 0 for segment in weight.segments)
    return shape.rope is not None and whole and shape.head_dim % (2 * TILE_ROWS) == 0


def _launch_as_one(
    backend: CudaBackend, qkv: Array, residual: Array, layer: Layer, cache: KVCacheLayer, batch: Batch
) -> None:
    """A launch a segment of equal format."""
    shape, norm, bias, weight = layer.attention, layer.attn_norm, layer.qkv_bias, layer.qkv_proj
    assert shape.rope is not None
    (num_rows, in_features), half = residual.shape, shape.head_dim // 2
    tokens, is_half = tokens_for(num_rows), cache.k.dtype == np.float16
    tables = [shape.rope.cos, shape.rope.sin, batch.positions, batch.slot_mapping]
    rest = [shape.num_heads, shape.num_kv_heads, half, cache.k.shape[2], int(bias is not None)]
    first_row, next_weights = 0, backend.next_weights(weight)
    for segment in weight.segments:
        pairs = segment.num_rows // (2 * TILE_ROWS)
        arrays = [qkv, *stored(cache), residual, norm.weight, segment.data, norm.weight if bias is None else bias]
        sizes = [num_rows, in_features, pairs, half // TILE_ROWS, first_row // shape.head_dim]
        kernel = norm_qkv_rope_store_kernel(segment.format, tokens, is_half)
        grid = stream_grid(backend.device, pairs, num_rows, tokens)
        ahead = ahead_of(next_weights if segment is weight.segments[-1] else None, segment.data, num_rows)
        backend.launch(kernel, grid, [*arrays, *tables, norm.eps, *sizes, *rest, *ahead])
        first_row += segment.num_rows
