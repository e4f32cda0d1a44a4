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
from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer
from numba_engine.backends.cuda.arrays import viewed
from numba_engine.backends.cuda.kernels import decode_attention, fma_attention, prefill_attention
from numba_engine.backends.cuda.kernels.attention_tiles import SEGMENT
from numba_engine.backends.layers import Attention
from numba_engine.errors import BackendUnavailableError

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

MAX_HEAD_DIM = 256
UNLIMITED = 2**31 - 1
"""A window no context fills."""


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


def splits_of(batch: Batch, shape: Attention, cache_dtype: np.dtype[np.generic]) -> Splits:
    num_splits = -(-batch.max_context_len // SEGMENT)
    group_size = shape.num_heads // shape.num_kv_heads
    tile_rows = 16 if uses_tensor_cores(shape, cache_dtype) and group_size > 8 else fma_attention.ROWS
    rows = -(-group_size // tile_rows) * tile_rows
    tiles = batch.num_seqs * shape.num_kv_heads * (rows // tile_rows)
    num_parts = tiles * num_splits * tile_rows if num_splits > 1 else 1
    return Splits(num_splits, tile_rows, rows, num_parts, tiles)


def uses_tensor_cores(shape: Attention, cache_dtype: np.dtype[np.generic]) -> bool:
    return cache_dtype == np.float16 and shape.head_dim <= prefill_attention.MAX_HEAD_DIM


def launch(backend: CudaBackend, out: Array, qkv: Array, cache: KVCacheLayer, batch: Batch, shape: Attention) -> None:
    head_dim, group_size = shape.head_dim, shape.num_heads // shape.num_kv_heads
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise BackendUnavailableError(
            f"head_dim = {head_dim}; backend {backend.name} takes multiples of 8 up to {MAX_HEAD_DIM}. Use backend cpu."
        )
    splits, float32 = splits_of(batch, shape, cache.k.dtype), np.dtype(np.float32)
    arrays = [out, qkv, viewed(cache.k, np.uint32), viewed(cache.v, np.uint32)]
    arrays += [batch.cu_seqlens_q, batch.context_lens, batch.block_tables]
    scratch = [backend.empty((splits.num_parts, size), float32) for size in (head_dim, 2)]
    scratch.append(backend.zero_arrivals(splits.num_counters))
    sizes = [shape.num_heads, shape.num_kv_heads, group_size, cache.k.shape[2].bit_length() - 1]
    sizes += [batch.block_tables.shape[1], UNLIMITED if shape.window is None else shape.window]
    split_sizes = [splits.num_splits, splits.rows]
    max_rows = batch.max_query_len * group_size
    split_blocks = -(-min(max_rows, splits.rows) // splits.tile_rows) * splits.num_splits
    others = shape.num_kv_heads, batch.num_seqs

    if not uses_tensor_cores(shape, cache.k.dtype):
        grid = max(-(-max_rows // splits.tile_rows), split_blocks), *others
        kernel = fma_attention.fma_attention_kernel(head_dim, cache.k.dtype == np.float16, shape.softcap)
        backend.launch(kernel, grid, [*arrays, *scratch, *sizes, *split_sizes, shape.scale])
        return
    has_many = max_rows > splits.rows
    all_alike = out.shape[0] == batch.num_seqs * batch.max_query_len
    if not (has_many and all_alike):
        backend.launch(
            decode_attention.decode_attention_kernel(head_dim, splits.tile_rows, shape.softcap),
            (split_blocks, *others),
            [*arrays, *scratch, *sizes, *split_sizes, shape.scale],
            shared_bytes=decode_attention.shared_bytes(head_dim),
        )
    if has_many:
        backend.launch(
            prefill_attention.prefill_attention_kernel(head_dim, shape.softcap),
            (-(-max_rows // prefill_attention.ROWS), *others),
            [*arrays, *sizes, splits.rows, shape.scale],
            shared_bytes=prefill_attention.shared_bytes(head_dim, batch.max_context_len),
        )
