"""Loading matrices into the layout of layout.py, in memory that suits streaming."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from numba_engine.backends.arrays import Segment, Weight
from numba_engine.backends.cpu.intrinsics import InstructionSet
from numba_engine.backends.cpu.kernels.linear import NEXT, NEXT_BYTES, TABLE_FIELDS, WEIGHTS, linear_kernel
from numba_engine.backends.cpu.kernels.quantize_rows import BF16, F32, INT8, RUN_SUMS
from numba_engine.backends.cpu.layout import GroupLayout, block_layout, num_groups
from numba_engine.backends.cpu.packing import pack
from numba_engine.formats import Format, StoredTensor

_HUGE_PAGE_BYTES = 1 << 21
_SLAB_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, eq=False)
class CpuWeight(Weight):
    """A weight and, for the launchers, one row of ``table`` (kernels/linear.py) a segment."""

    table: np.ndarray  # [segments, TABLE_FIELDS] int64
    segment_rows: tuple[int, ...]


def load_weight(
    name: str,
    tensors: Sequence[StoredTensor],
    memory: WeightMemory,
    *,
    int8_activations: bool,
    isa: InstructionSet,
    num_threads: int = 1,
) -> CpuWeight:
    """Stack matrices of equal in_features by rows; neighbours of one format share a segment where groups allow it."""
    in_features = tensors[0].shape[1]
    assert all(t.shape[1] == in_features for t in tensors)
    segments: list[Segment] = []
    table = []
    first_row = 0
    for run in _runs(tensors):
        layout = GroupLayout(run[0].format, in_features)
        groups = [num_groups(t.shape[0]) for t in run]
        buffer = memory.allocate(sum(groups) * layout.group_bytes).reshape(sum(groups), layout.group_bytes)
        at = 0
        for tensor, count in zip(run, groups, strict=True):
            pack(tensor, buffer[at : at + count], num_threads)
            at += count
        rows = sum(t.shape[0] for t in run)
        form = x_form(layout.format) if int8_activations else F32
        kernel = linear_kernel(layout.format, form, "generic" if form == F32 else isa)
        address = buffer.ctypes.data
        if form == INT8 and block_layout(layout.format).has_runs:
            form |= RUN_SUMS
        table.append([kernel, address, layout.group_bytes, layout.scale_bytes, rows, first_row, form, 0, 0])
        segments.append(Segment(layout.format, rows, buffer.nbytes, buffer))
        first_row += rows
    fields = np.array(table, dtype=np.int64)
    assert fields.shape[1] == TABLE_FIELDS
    # Gate and up are read side by side, so in order is only the gate.
    in_order = segments[0].nbytes // (2 if len(tensors) == 2 and len(segments) == 1 else 1)
    memory.tell_previous(fields, in_order)
    rows_each = tuple(segment.num_rows for segment in segments)
    return CpuWeight(name, (first_row, in_features), tuple(segments), fields, rows_each)


def _runs(tensors: Sequence[StoredTensor]) -> list[list[StoredTensor]]:
    """Neighbours of one format, as long as each but the last fills whole groups."""
    runs: list[list[StoredTensor]] = []
    for tensor in tensors:
        if runs and runs[-1][-1].format is tensor.format and runs[-1][-1].shape[0] % 16 == 0:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return runs


def x_form(format: Format) -> int:
    """What weights are multiplied with unless it is to be float32."""
    if format.is_quantized:
        return INT8
    return BF16 if format.float_type == "bf16" else F32


class WeightMemory:
    """Memory for weights: one after the other in large slabs, in huge pages where the system gives them.

    Weights lie in the order of loading, which is that of use, so what is prefetched past the end of one is the next
    one's beginning. Pages are only taken once they are written; a slab is freed with the last array in it.
    """

    def __init__(self) -> None:
        self._slab = np.empty(0, dtype=np.uint8)
        self._used = 0
        self._previous: np.ndarray | None = None

    def tell_previous(self, table: np.ndarray, nbytes: int) -> None:
        """Note in the weight loaded before that this one, whose first ``nbytes`` are read in order, is used next."""
        if self._previous is not None:
            self._previous[0, NEXT] = table[0, WEIGHTS]
            self._previous[0, NEXT_BYTES] = nbytes
        self._previous = table

    def allocate(self, nbytes: int) -> np.ndarray:
        """uint8, 64-aligned, zero."""
        if self._used + nbytes > self._slab.size:
            self._slab = allocate(max(nbytes, _SLAB_BYTES))
            self._used = 0
        start = self._used
        self._used += -(-nbytes // 64) * 64
        return self._slab[start : start + nbytes]


def allocate(nbytes: int) -> np.ndarray:
    """Page-aligned uint8, zero, in huge pages where the system gives them."""
    size = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    # Private: memory that could be shared, Python's default, gets no huge pages on most systems.
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, size, flags=private) if private else mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)
