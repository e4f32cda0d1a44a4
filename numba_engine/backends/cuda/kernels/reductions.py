"""Sums over a warp and a block, always in the same order."""

from __future__ import annotations

from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.cuda.kernels.intrinsics import as_float, divide, fma, load_quad, sqrt

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


@cuda.jit(device=True, inline="always")
def sum_of_squares(x, first, size):  # type: ignore[no-untyped-def]
    """What the calling warp, one of 8, adds to the sum of squares of x[first : first + size]; in every lane of it.

    Sizes and places that are multiples of 4 are read 16 bytes at a time.
    """
    squares = float32(0)
    i = uint32(cuda.threadIdx.x)
    if uint32(size & uint32(3)) == uint32(0):
        while uint32(i * uint32(4)) < size:
            quad = load_quad(x, uint32(first + i * uint32(4)))
            for w in range(4):
                squares = fma(quad[w], quad[w], squares)
            i = uint32(i + uint32(256))
    else:
        while i < size:
            value = x[uint32(first + i)]
            squares = fma(value, value, squares)
            i = uint32(i + uint32(256))
    return sum_warp(squares)


@cuda.jit(device=True, inline="always")
def inverse_rms(warp_sums, first, size, eps):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean of squares + eps) of 8 warps' ``sum_of_squares``, whose bits are at warp_sums[first : …]."""
    total = float32(0)
    for warp in range(8):
        total += as_float(warp_sums[uint32(first + uint32(warp))])
    mean = divide(total, float32(size))
    return divide(float32(1), sqrt(float32(mean + eps)))
