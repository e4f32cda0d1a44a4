"""store_kv: the k and v heads of new tokens go to their slots of the paged cache (Kwon et al. 2023, "PagedAttention").

Arrays (flat): k_cache, v_cache [B, KV, block_size, D], float32 or half (as uint16 bits); qkv float32
[num_tokens, (H + 2 KV) D]; slot_mapping int32 [num_tokens], a slot being block * block_size + offset, and -1 for a row
that is padding and goes nowhere.

A thread an element of k and of v; neighbours share a head, so reads and writes are coalesced. No shared memory.
Bytes moved: k and v once each way.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numba import cuda
from numba.cuda.types import float32, int32, uint16, uint32

from numba_engine.backends.arrays import Array, KVCacheLayer
from numba_engine.backends.cuda.arrays import viewed
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.intrinsics import float_to_half
from numba_engine.backends.layers import Attention

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 256


@cuda.jit(device=True, inline="always")
def head_in_slot(slot, head, num_kv_heads, head_dim, block_size):  # type: ignore[no-untyped-def]
    """Where the head's elements of a slot begin in a cache."""
    block = uint32(slot // block_size)
    row = uint32(uint32(block * num_kv_heads + head) * block_size + (slot - block * block_size))
    return uint32(row * head_dim)


@cache
def store_kv_kernel(is_half: bool) -> Kernel:
    convert = float_to_half if is_half else float32

    def store_kv(k_cache, v_cache, qkv, slot_mapping, stride, num_heads, num_kv_heads, head_dim, block_size):  # type: ignore[no-untyped-def]
        i = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if i >= uint32(num_kv_heads * head_dim):
            return
        token = uint32(cuda.blockIdx.x)
        head = uint32(i // head_dim)
        if slot_mapping[token] < 0:
            return
        slot = uint32(slot_mapping[token])
        place = uint32(head_in_slot(slot, head, num_kv_heads, head_dim, block_size) + (i - head * head_dim))
        k = uint32(token * stride + num_heads * head_dim + i)
        k_cache[place] = convert(qkv[k])
        v_cache[place] = convert(qkv[uint32(k + num_kv_heads * head_dim)])

    cache_type = (uint16 if is_half else float32)[::1]
    arguments = (cache_type, cache_type, float32[::1], int32[::1], *[uint32] * 5)
    return Kernel(f"store_kv_{'f16' if is_half else 'f32'}", store_kv, arguments, THREADS)


def launch(backend: CudaBackend, cache: KVCacheLayer, qkv: Array, slot_mapping: Array, shape: Attention) -> None:
    num_tokens, stride = qkv.shape
    is_half = cache.k.dtype == np.float16
    grid = num_tokens, -(-shape.num_kv_heads * shape.head_dim // THREADS)
    sizes = [stride, shape.num_heads, shape.num_kv_heads, shape.head_dim, cache.k.shape[2]]
    backend.launch(store_kv_kernel(is_half), grid, [*stored(cache), qkv, slot_mapping, *sizes])


def stored(cache: KVCacheLayer) -> list[Array]:
    """k and v as kernels write them: halves as uint16."""
    return [viewed(array, np.uint16) if array.dtype == np.float16 else array for array in (cache.k, cache.v)]
