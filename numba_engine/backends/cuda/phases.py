"""Phases of a layer as one kernel, where shape and format allow it; what they compute is what the textbook ops compute.

A phase is fused for as many tokens as one pass over its weights serves. Beyond that the ops by themselves are as good:
their time is the tensor cores', and a kernel that normalises is a small part of it.
"""

from __future__ import annotations

from numba_engine.backends.cuda.kernels.linear import PackedSegment
from numba_engine.backends.cuda.kernels.packing import TILE_ROWS
from numba_engine.backends.cuda.kernels.streaming import TOKENS
from numba_engine.backends.layers import Attention
from numba_engine.formats import F32


def fuses_norm(num_rows: int, segments: list[PackedSegment]) -> bool:
    """Whether rms_norm can be part of the matrix product that follows."""
    return num_rows <= TOKENS[-1] and all(segment.format is not F32 for segment in segments)


def fuses_activation(num_rows: int, segments: list[PackedSegment], size: int) -> bool:
    """Whether a block can make gate and up of the same outputs: they are one segment, cut between tiles."""
    return fuses_norm(num_rows, segments) and len(segments) == 1 and size % TILE_ROWS == 0


def fuses_rope(num_rows: int, segments: list[PackedSegment], shape: Attention) -> bool:
    """Whether a block can make both halves of a rotation: halves of heads are whole tiles."""
    whole = all(segment.num_rows % shape.head_dim == 0 for segment in segments)
    return fuses_norm(num_rows, segments) and whole and shape.head_dim % (2 * TILE_ROWS) == 0
