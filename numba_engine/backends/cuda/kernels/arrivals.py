"""Blocks that finish a piece of work together: the last of them to arrive sees what all have written."""

from __future__ import annotations

from numba import cuda
from numba.cuda.types import uint32


@cuda.jit(device=True, inline="always")
def is_last_to_arrive(arrivals, counter, expected, arrived):  # type: ignore[no-untyped-def]
    """Count this block in, with all it has written; the last of ``expected`` sees what the others wrote.

    It puts the counter back to zero for the next launch. ``arrived`` is one shared word. ("Memory Fence Functions",
    CUDA C++ Programming Guide.)
    """
    cuda.threadfence()
    cuda.syncthreads()
    if uint32(cuda.threadIdx.x) == uint32(0):
        count = uint32(cuda.atomic.add(arrivals, counter, uint32(1)) + uint32(1))
        if count == expected:
            arrivals[counter] = uint32(0)
        arrived[0] = count
    cuda.syncthreads()
    cuda.threadfence()
    return uint32(arrived[0]) == expected
