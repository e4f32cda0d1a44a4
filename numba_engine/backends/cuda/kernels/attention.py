"""attention: out = softmax(q kᵀ scale) v over the paged cache: grouped queries, causal, windowed.

Which kernel computes which rows. A cache of halves with heads of up to 128 dimensions goes to the tensor cores:
sequences with few rows (decode) to ``decode_attention``, those with many to ``prefill_attention``, whose bits are the
same. In a step with both kinds each kernel leaves the other's sequences alone. The rest is for ``fma_attention``. A
softcap of scores is a constant in a kernel's code, so that kernels without one have no trace of it.

Geometry: grid (x, KV head, sequence). Of a sequence with few rows x is a segment of its context, else a tile of its
rows: so one that decodes is split whatever runs beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_engine.backends.cuda.device import Device, DeviceArray, flat
from numba_engine.backends.cuda.kernels import decode_attention, fma_attention, prefill_attention
from numba_engine.backends.cuda.kernels.attention_tiles import SEGMENT
from numba_engine.backends.layers import Attention

MAX_HEAD_DIM = 256
UNLIMITED = 2**31 - 1
"""A window no context fills."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """The part of a batch that attention reads. The two maxima may be larger than the truth."""

    cu_seqlens_q: DeviceArray
    context_lens: DeviceArray
    block_tables: DeviceArray
    num_seqs: int
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class Splits:
    """How the contexts of a step are split over blocks, and the sizes of the scratch arrays for it."""

    num_splits: int
    """Segments of the longest context."""
    tile_rows: int
    """Rows (query tokens × heads of a KV head) of a block."""
    rows: int
    """Rows that a sequence may have and be split: those of one token, in whole tiles."""
    num_parts: int
    """Rows of ``partials`` [num_parts, D] and ``stats`` [num_parts, 2]."""
    num_counters: int


def splits_of(sequences: Sequences, shape: Attention, cache_dtype: np.dtype[np.generic]) -> Splits:
    num_splits = -(-sequences.max_context_len // SEGMENT)
    group_size = shape.num_heads // shape.num_kv_heads
    tile_rows = 16 if uses_tensor_cores(shape, cache_dtype) and group_size > 8 else fma_attention.ROWS
    rows = -(-group_size // tile_rows) * tile_rows
    tiles = sequences.num_seqs * shape.num_kv_heads * (rows // tile_rows)
    num_parts = tiles * num_splits * tile_rows if num_splits > 1 else 1
    return Splits(num_splits, tile_rows, rows, num_parts, tiles)


def uses_tensor_cores(shape: Attention, cache_dtype: np.dtype[np.generic]) -> bool:
    return cache_dtype == np.float16 and shape.head_dim <= prefill_attention.MAX_HEAD_DIM


@dataclass(frozen=True, slots=True)
class Scratch:
    """Arrays of the sizes that ``splits_of`` says. ``arrivals`` (uint32) holds zeros before and after."""

    partials: DeviceArray
    stats: DeviceArray
    arrivals: DeviceArray


def attention(
    device: Device,
    out: DeviceArray,
    qkv: DeviceArray,
    k_cache: DeviceArray,
    v_cache: DeviceArray,
    sequences: Sequences,
    scratch: Scratch,
    shape: Attention,
) -> None:
    """head_dim is a multiple of 8 up to ``MAX_HEAD_DIM``."""
    head_dim, group_size = shape.head_dim, shape.num_heads // shape.num_kv_heads
    splits = splits_of(sequences, shape, k_cache.dtype)
    words = [k_cache.view(np.uint32), v_cache.view(np.uint32)]
    arrays = [*map(flat, [out, qkv]), *words, *map(flat, [sequences.cu_seqlens_q, sequences.context_lens])]
    arrays.append(flat(sequences.block_tables))
    scratch_arrays = [*map(flat, [scratch.partials, scratch.stats, scratch.arrivals])]
    sizes = [shape.num_heads, shape.num_kv_heads, group_size, k_cache.shape[2].bit_length() - 1]
    sizes += [sequences.block_tables.shape[1], UNLIMITED if shape.window is None else shape.window]
    split_sizes = [splits.num_splits, splits.rows]
    max_rows = sequences.max_query_len * group_size
    split_blocks = -(-min(max_rows, splits.rows) // splits.tile_rows) * splits.num_splits
    others = shape.num_kv_heads, sequences.num_seqs

    if not uses_tensor_cores(shape, k_cache.dtype):
        grid = max(-(-max_rows // splits.tile_rows), split_blocks), *others
        kernel = fma_attention.fma_attention_kernel(head_dim, k_cache.dtype == np.float16, shape.softcap)
        device.launch(kernel, grid, [*arrays, *scratch_arrays, *sizes, *split_sizes, shape.scale])
        return
    has_many = max_rows > splits.rows
    all_alike = out.shape[0] == sequences.num_seqs * sequences.max_query_len
    if not (has_many and all_alike):
        device.launch(
            decode_attention.decode_attention_kernel(head_dim, splits.tile_rows, shape.softcap),
            (split_blocks, *others),
            [*arrays, *scratch_arrays, *sizes, *split_sizes, shape.scale],
            shared_bytes=decode_attention.shared_bytes(head_dim),
        )
    if has_many:
        device.launch(
            prefill_attention.prefill_attention_kernel(head_dim, shape.softcap),
            (-(-max_rows // prefill_attention.ROWS), *others),
            [*arrays, *sizes, splits.rows, shape.scale],
            shared_bytes=prefill_attention.shared_bytes(head_dim, sequences.max_context_len),
        )
