"""Sums over a warp and a block, always in the same order."""

from __future__ import annotations

from numba import cuda
from numba.cuda.types import float32, uint32

FULL_WARP = 0xFFFFFFFF


@cuda.jit(device=True, inline="always")
def sum_warp(value):  # type: ignore[no-untyped-def]
    """The sum over the warp's 32 lanes, in every one of them: a butterfly of shuffles."""
    value += cuda.shfl_xor_sync(FULL_WARP, value, 16)
    value += cuda.shfl_xor_sync(FULL_WARP, value, 8)
    value += cuda.shfl_xor_sync(FULL_WARP, value, 4)
    value += cuda.shfl_xor_sync(FULL_WARP, value, 2)
    value += cuda.shfl_xor_sync(FULL_WARP, value, 1)
    return value


@cuda.jit(device=True, inline="always")
def sum_block(value, warp_sums, num_warps):  # type: ignore[no-untyped-def]
    """The sum over the block, in every thread. ``warp_sums`` is shared float32 [num_warps], free for this."""
    thread = uint32(cuda.threadIdx.x)
    value = sum_warp(value)
    if uint32(thread & uint32(31)) == uint32(0):
        warp_sums[uint32(thread >> uint32(5))] = value
    cuda.syncthreads()
    total = float32(0)
    for warp in range(num_warps):
        total += warp_sums[warp]
    return total
