"""rope: rotate the q and k heads to their positions, in place (Su et al. 2021, "RoFormer").

    (a, b) -> (a cos - b sin, b cos + a sin),  a = head[i], b = head[i + D/2]

Arrays (flat): qkv float32 [num_tokens, (H + 2 KV) D]; positions int32 [num_tokens]; cos, sin float32 [max_len, D/2],
whatever scaling the model asks for (llama3's among them) already in the tables.

A thread a pair; neighbouring threads take neighbouring pairs, so both halves are coalesced. No shared memory.
Bytes moved: the q and k heads once each way, one row of the tables a token.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from numba_engine.backends.arrays import Array
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.intrinsics import fma
from numba_engine.backends.layers import Attention

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 128


@cuda.jit(device=True, inline="always")
def rotate(a, b, cos, sin):  # type: ignore[no-untyped-def]
    return fma(a, cos, -float32(b * sin)), fma(b, cos, float32(a * sin))


@cache
def rope_kernel() -> Kernel:
    def rope(qkv, positions, cos_table, sin_table, stride, num_pairs, half):  # type: ignore[no-untyped-def]
        pair = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if pair >= num_pairs:
            return
        token = uint32(cuda.blockIdx.x)
        head = uint32(pair // half)
        i = uint32(pair - head * half)
        place = uint32(uint32(positions[token]) * half + i)
        cos, sin = cos_table[place], sin_table[place]
        first = uint32(token * stride + head * half * uint32(2) + i)
        a, b = qkv[first], qkv[uint32(first + half)]
        qkv[first], qkv[uint32(first + half)] = rotate(a, b, cos, sin)

    arguments = (float32[::1], int32[::1], float32[::1], float32[::1], uint32, uint32, uint32)
    return Kernel("rope", rope, arguments, THREADS)


def launch(backend: CudaBackend, qkv: Array, positions: Array, shape: Attention) -> None:
    assert shape.rope is not None
    num_tokens, stride = qkv.shape
    half = shape.head_dim // 2
    num_pairs = (shape.num_heads + shape.num_kv_heads) * half
    grid = num_tokens, -(-num_pairs // THREADS)
    arrays = [qkv, positions, shape.rope.cos, shape.rope.sin]
    backend.launch(rope_kernel(), grid, [*arrays, stride, num_pairs, half])
