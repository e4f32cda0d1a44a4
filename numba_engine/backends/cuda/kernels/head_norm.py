"""head_norm: RMSNorm of every q head and every k head by itself, in place (Qwen3; Yang et al. 2025).

Arrays (flat): qkv float32 [num_tokens, (H + 2 KV) D]; q_norm, k_norm float32 [D].

A warp a head, 8 heads a block; no shared memory, the sum of squares is a butterfly of shuffles.
Bytes moved: the q and k heads once each way.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.arrays import Array, Norm
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.intrinsics import divide, fma, sqrt
from numba_engine.backends.cuda.kernels.reductions import sum_warp
from numba_engine.backends.layers import Attention

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 256
WARPS = THREADS // 32


@cache
def head_norm_kernel() -> Kernel:
    def head_norm(qkv, q_norm, k_norm, stride, num_heads, num_normed, head_dim, eps):  # type: ignore[no-untyped-def]
        lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
        head = uint32(uint32(cuda.blockIdx.y) * uint32(WARPS) + (uint32(cuda.threadIdx.x) >> uint32(5)))
        if head >= num_normed:
            return
        first = uint32(uint32(cuda.blockIdx.x) * stride + head * head_dim)
        squares = float32(0)
        i = lane
        while i < head_dim:
            value = qkv[uint32(first + i)]
            squares = fma(value, value, squares)
            i = uint32(i + uint32(32))
        mean = divide(sum_warp(squares), float32(head_dim))
        scale = divide(float32(1), sqrt(float32(mean + eps)))
        i = lane
        while i < head_dim:
            weight = q_norm[i] if head < num_heads else k_norm[i]
            qkv[uint32(first + i)] = float32(qkv[uint32(first + i)] * scale) * weight
            i = uint32(i + uint32(32))

    arguments = (float32[::1], float32[::1], float32[::1], uint32, uint32, uint32, uint32, float32)
    return Kernel("head_norm", head_norm, arguments, THREADS)


def launch(backend: CudaBackend, qkv: Array, q_norm: Norm, k_norm: Norm, shape: Attention) -> None:
    num_tokens, stride = qkv.shape
    num_normed = shape.num_heads + shape.num_kv_heads
    sizes = [stride, shape.num_heads, num_normed, shape.head_dim]
    grid = num_tokens, -(-num_normed // WARPS)
    backend.launch(head_norm_kernel(), grid, [qkv, q_norm.weight, k_norm.weight, *sizes, q_norm.eps])
