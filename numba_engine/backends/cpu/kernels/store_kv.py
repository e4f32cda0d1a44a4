"""store_kv: the k and v heads of qkv [T, (H + 2 KV) D] go to their slots of the paged cache.

cache k, v: [B, KV, block_size, D] float32 or float16 (rounded to nearest even); slot = block * block_size + offset.
Bytes moved: k and v of T tokens in and out.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array, KVCacheLayer
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.compilation import inner, kernel_address
from numba_engine.backends.cpu.intrinsics import load_f32, load_i32, load_i64, store_f16, store_f32
from numba_engine.backends.cpu.thread_team import ARGS, run
from numba_engine.backends.layers import Attention

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

_K, _V, _QKV, _ROW, _SLOTS, _KV, _BLOCK_SIZE, _D, _IS_F16 = range(9)


def launch(backend: CpuBackend, cache: KVCacheLayer, qkv: Array, slot_mapping: Array, shape: Attention) -> None:
    backend.call(
        store_kv, store_kv_kernel(), *backend.cache_words(cache), *cache.k.shape[1:], cache.k.dtype.itemsize,
        qkv, *qkv.shape, slot_mapping,
    )  # fmt: skip


@Command
def store_kv(
    team: np.ndarray, kernel: int, k: int, v: int, num_kv_heads: int, block_size: int, d: int, element_bytes: int,
    qkv: int, num_tokens: int, row: int, slots: int,
) -> None:  # fmt: skip
    team[ARGS + _K] = k
    team[ARGS + _V] = v
    team[ARGS + _KV] = num_kv_heads
    team[ARGS + _BLOCK_SIZE] = block_size
    team[ARGS + _D] = d
    team[ARGS + _IS_F16] = element_bytes == 2
    team[ARGS + _QKV] = qkv
    team[ARGS + _ROW] = row
    team[ARGS + _SLOTS] = slots
    run(team, kernel, num_tokens, 1 + 8192 // row)


@functools.cache
def store_kv_kernel() -> int:
    def store_kv_rows(begin: int, end: int, args: int) -> None:
        num_kv_heads, d, block_size = load_i64(args, _KV), load_i64(args, _D), load_i64(args, _BLOCK_SIZE)
        row_size = load_i64(args, _ROW)
        for t in range(begin, end):
            heads = load_i64(args, _QKV) + (t * row_size + row_size - 2 * num_kv_heads * d) * 4
            slot = np.int64(load_i32(load_i64(args, _SLOTS), t))
            store_heads(
                load_i64(args, _K),
                load_i64(args, _V),
                heads,
                slot,
                num_kv_heads,
                d,
                block_size,
                load_i64(args, _IS_F16),
            )

    return kernel_address(store_kv_rows, "void(int64, int64, int64)")


@inner
def store_heads(k: int, v: int, heads: int, slot: int, num_kv_heads: int, d: int, block_size: int, is_f16: int) -> None:
    """``heads`` is the address of the token's k heads, its v heads behind them. Padding has a slot below 0."""
    if slot < 0:
        return
    block, offset = slot // block_size, slot % block_size
    for head in range(2 * num_kv_heads):
        kv_head = head % num_kv_heads
        to = ((block * num_kv_heads + kv_head) * block_size + offset) * d
        cache = k if head < num_kv_heads else v
        source = heads + head * d * 4
        if is_f16:
            for i in range(d):
                store_f16(cache, to + i, load_f32(source, i))
        else:
            for i in range(d):
                store_f32(cache, to + i, load_f32(source, i))
