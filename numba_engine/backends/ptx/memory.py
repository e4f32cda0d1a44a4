"""The memory of the simulated device: one arena of global memory with guard gaps, and per-block windows.

Addresses are 64-bit. Global memory (constants and kernel parameters included) starts at ``GLOBAL_BASE``; generic
addresses of shared and local memory lie in windows of their own. Allocations are 256-byte aligned with an unowned gap
between them, so that an index past the end of an array is seen instead of landing in its neighbour.
"""

from __future__ import annotations

import bisect
import mmap
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
from numba import int64, njit, uint64

from numba_engine.backends.ptx.errors import ErrorKind
from numba_engine.errors import OutOfMemoryError

GLOBAL_BASE = 0x10_0000_0000
SHARED_WINDOW = 1 << 48
LOCAL_WINDOW = 1 << 49
ALIGNMENT = 256
_LINUX_MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE of Python 3.13
GUARD_BYTES = 512

OK = -1
OUT_OF_BOUNDS, MISALIGNED, UNINITIALISED, READ_ONLY = range(4)
FAULTS: tuple[ErrorKind, ...] = ("out-of-bounds", "misaligned", "uninitialised-global", "read-only")


@dataclass(slots=True, eq=False)
class Allocation:
    """A named piece of global memory: ``nbytes`` from address ``start``."""

    name: str
    start: int
    nbytes: int
    read_only: bool = False

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class Written:
    """What the launch in progress has written, for reads that may not see it."""

    def __init__(self, stamps: np.ndarray) -> None:
        self.stamps = stamps
        """uint32 per word of the arena: the last launch that wrote it."""
        self.launch = np.uint32(0)
        self.bounds = np.zeros(2, np.uint64)
        """All that it has written lies from the one offset to the other."""

    def begin_launch(self) -> None:
        self.launch += np.uint32(1)
        self.bounds[:] = np.iinfo(np.uint64).max, 0


class Arena:
    """Global memory: reserved address space, backed by real memory as it is touched."""

    def __init__(self, capacity_bytes: int | None = None, *, track_initialised: bool = False) -> None:
        self.capacity_bytes = capacity_bytes or psutil.virtual_memory().total
        self.capacity_bytes = -(-self.capacity_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.bytes = reserve(self.capacity_bytes)
        self.initialised = reserve(self.capacity_bytes) if track_initialised else None
        """One byte per byte of memory, 1 once written."""
        self.allocations: list[Allocation] = []
        """Ascending by address."""
        self._views: dict[Any, np.ndarray] = {np.dtype(np.uint8): self.bytes}
        self.written = Written(reserve(self.capacity_bytes).view(np.uint32))
        self.table = np.zeros((3, 0), np.uint64)
        """Starts and ends of the allocations, as offsets into the arena, and 1 for those that are read-only."""

    def view(self, dtype: Any) -> np.ndarray:
        kind = np.dtype(dtype)
        if kind not in self._views:
            self._views[kind] = self.bytes.view(kind)
        return self._views[kind]

    def allocate(self, name: str, nbytes: int, *, read_only: bool = False) -> Allocation:
        """First fit. Raises OutOfMemoryError with the numbers."""
        needed = max(nbytes, 1)
        start = GUARD_BYTES
        place = 0
        for place, allocation in enumerate([*self.allocations, None]):  # noqa: B007
            limit = self.capacity_bytes if allocation is None else allocation.start - GLOBAL_BASE
            if start + needed + GUARD_BYTES <= limit:
                break
            if allocation is None:
                raise OutOfMemoryError(
                    f"{name} needs {nbytes} bytes; the simulated device has {self.capacity_bytes}, "
                    f"{self.used_bytes} of them taken"
                )
            start = -(-(allocation.end - GLOBAL_BASE + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
        allocation = Allocation(name, GLOBAL_BASE + start, needed, read_only)
        self.allocations.insert(place, allocation)
        self._refresh()
        if self.initialised is not None:
            self.initialised[start : start + needed] = 0
        return allocation

    def free(self, allocation: Allocation) -> None:
        self.allocations.remove(allocation)
        self._refresh()

    def contents(self, allocation: Allocation) -> np.ndarray:
        """The bytes, as a view."""
        start = allocation.start - GLOBAL_BASE
        return self.bytes[start : start + allocation.nbytes]

    def write(self, allocation: Allocation, data: np.ndarray, offset_bytes: int = 0) -> None:
        start = allocation.start - GLOBAL_BASE + offset_bytes
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.bytes[start : start + flat.size] = flat
        if self.initialised is not None:
            self.initialised[start : start + flat.size] = 1

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds the address."""
        place = bisect.bisect_right(self.allocations, address, key=lambda a: a.start) - 1
        if place >= 0 and address < self.allocations[place].end:
            return self.allocations[place]
        return None

    def nearest(self, address: int) -> Allocation | None:
        """The allocation the address most likely missed."""
        return min(
            self.allocations,
            key=lambda a: max(a.start - address, address - a.end + 1, 0),
            default=None,
        )

    @property
    def used_bytes(self) -> int:
        return sum(allocation.nbytes for allocation in self.allocations)

    def _refresh(self) -> None:
        self.table = np.array(
            [
                [allocation.start - GLOBAL_BASE for allocation in self.allocations],
                [allocation.end - GLOBAL_BASE for allocation in self.allocations],
                [allocation.read_only for allocation in self.allocations],
            ],
            np.uint64,
        )


def reserve(nbytes: int) -> np.ndarray:
    """Zeroed bytes that take no memory before they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if sys.platform == "linux":
        flags |= _LINUX_MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)


# ---- compiled access -------------------------------------------------------------------------------------------------
#
# All take: addresses (flat, one per lane), an immediate offset and the base to subtract, the table of valid ranges, the
# lanes that take part, and the memory seen as elements. Lanes come in units of ``unit`` (a block for shared memory, one
# thread for local, everything for global) with ``stride`` elements from unit to unit. Checks return OK, or
# 4 * lane + fault.


@njit(cache=True, nogil=True)
def locate(table, offset):  # type: ignore[no-untyped-def]
    """Index of the last range that starts at or before the offset, -1 if none."""
    low, high = 0, table.shape[1]
    while low < high:
        middle = (low + high) >> 1
        if table[0, middle] <= offset:
            low = middle + 1
        else:
            high = middle
    return low - 1


@njit(cache=True, nogil=True)
def check_access(addresses, immediate, base, table, mask, nbytes, writes):  # type: ignore[no-untyped-def]
    """Bounds, alignment and permission of an access of ``nbytes``."""
    width = uint64(nbytes)
    low, high = uint64(1), uint64(0)
    for lane in range(addresses.size):
        if mask[lane]:
            offset = uint64(addresses[lane]) + uint64(immediate) - uint64(base)
            if offset < low or offset + width > high:
                place = locate(table, offset)
                if place < 0 or offset + width > table[1, place] or offset + width < offset:
                    return 4 * lane + OUT_OF_BOUNDS
                if writes and table[2, place]:
                    return 4 * lane + READ_ONLY
                low, high = table[0, place], table[1, place]
            if offset & (width - uint64(1)):
                return 4 * lane + MISALIGNED
    return OK


@njit(cache=True, nogil=True)
def load(addresses, immediate, base, mask, memory, unit, stride, out):  # type: ignore[no-untyped-def]
    size = uint64(memory.itemsize)
    start = uint64(immediate) - uint64(base)
    for first in range(0, addresses.size, unit):
        origin = uint64(first // unit) * uint64(stride)
        for lane in range(first, first + unit):
            if mask[lane]:
                out[lane] = memory[origin + (addresses[lane] + start) // size]


@njit(cache=True, nogil=True)
def load2(addresses, immediate, base, mask, memory, unit, stride, out0, out1):  # type: ignore[no-untyped-def]
    size = uint64(memory.itemsize)
    start = uint64(immediate) - uint64(base)
    for first in range(0, addresses.size, unit):
        origin = uint64(first // unit) * uint64(stride)
        for lane in range(first, first + unit):
            if mask[lane]:
                at = origin + (addresses[lane] + start) // size
                out0[lane] = memory[at]
                out1[lane] = memory[at + uint64(1)]


@njit(cache=True, nogil=True)
def load4(addresses, immediate, base, mask, memory, unit, stride, out0, out1, out2, out3):  # type: ignore[no-untyped-def]
    size = uint64(memory.itemsize)
    start = uint64(immediate) - uint64(base)
    for first in range(0, addresses.size, unit):
        origin = uint64(first // unit) * uint64(stride)
        for lane in range(first, first + unit):
            if mask[lane]:
                at = origin + (addresses[lane] + start) // size
                out0[lane] = memory[at]
                out1[lane] = memory[at + uint64(1)]
                out2[lane] = memory[at + uint64(2)]
                out3[lane] = memory[at + uint64(3)]


@njit(cache=True, nogil=True)
def store(addresses, immediate, base, mask, memory, unit, stride, value):  # type: ignore[no-untyped-def]
    size = uint64(memory.itemsize)
    start = uint64(immediate) - uint64(base)
    for first in range(0, addresses.size, unit):
        origin = uint64(first // unit) * uint64(stride)
        for lane in range(first, first + unit):
            if mask[lane]:
                memory[origin + (addresses[lane] + start) // size] = value[lane]


@njit(cache=True, nogil=True)
def mark(addresses, immediate, base, mask, initialised, nbytes):  # type: ignore[no-untyped-def]
    start = uint64(immediate) - uint64(base)
    for lane in range(addresses.size):
        if mask[lane]:
            offset = addresses[lane] + start
            for byte in range(nbytes):
                initialised[offset + uint64(byte)] = 1


@njit(cache=True, nogil=True)
def check_initialised(addresses, immediate, base, mask, initialised, nbytes):  # type: ignore[no-untyped-def]
    start = uint64(immediate) - uint64(base)
    for lane in range(addresses.size):
        if mask[lane]:
            offset = addresses[lane] + start
            for byte in range(nbytes):
                if not initialised[offset + uint64(byte)]:
                    return 4 * lane + UNINITIALISED
    return OK


@njit(cache=True, nogil=True)
def mark_written(addresses, immediate, base, mask, nbytes, stamps, launch, bounds):  # type: ignore[no-untyped-def]
    start, last = uint64(immediate) - uint64(base), uint64(nbytes - 1)
    for lane in range(addresses.size):
        if mask[lane]:
            offset = addresses[lane] + start
            bounds[0], bounds[1] = min(bounds[0], offset), max(bounds[1], offset + last)
            for word in range(offset >> uint64(2), ((offset + last) >> uint64(2)) + uint64(1)):
                stamps[word] = launch


@njit(cache=True, nogil=True)
def find_written(addresses, immediate, base, mask, nbytes, stamps, launch, bounds):  # type: ignore[no-untyped-def]
    """The first lane whose access touches a word the launch has written, else OK."""
    start, last = uint64(immediate) - uint64(base), uint64(nbytes - 1)
    for lane in range(addresses.size):
        if mask[lane]:
            offset = addresses[lane] + start
            if offset <= bounds[1] and offset + last >= bounds[0]:
                for word in range(offset >> uint64(2), ((offset + last) >> uint64(2)) + uint64(1)):
                    if stamps[word] == launch:
                        return lane
    return OK


# ---- races in shared memory ------------------------------------------------------------------------------------------
#
# Shadow of each granule, int32 [8]: writer thread, the block's barrier count and its warp's sync count when it wrote;
# reader thread (or -2 - warp for several of one warp, MANY for several warps) and the same two counts; the batch in
# which it was written at all; the batch in which a copy to it is in flight. Barrier counts and batch numbers never
# repeat, so the shadow need not be cleared.

MANY = -(1 << 30)
SHADOW_FIELDS = 8
WRITER, W_EPOCH, W_SYNC, READER, R_EPOCH, R_SYNC, WRITTEN, FLIGHT = range(8)
RACE, NOT_WRITTEN, IN_FLIGHT = 0, 1, 2


@njit(cache=True, nogil=True)
def check_shared(  # type: ignore[no-untyped-def]
    addresses,
    immediate,
    mask,
    nbytes,
    granule_log2,
    threads,
    granules,
    shadow,
    epochs,
    syncs,
    stamp,
    writes,
    reads,
    other,
):
    """Note an access of every lane and compare it with what the shadow says. Returns OK or 4 * lane + fault.

    ``epochs`` [blocks] counts barriers, ``syncs`` [blocks, warps] warp synchronisations; ``stamp`` numbers the batch;
    ``other[0]`` becomes the other thread of a race. ``writes`` is 2 for atomics, which do not race with one another.
    """
    count = max(1, nbytes >> granule_log2)
    for block in range(epochs.size):
        epoch = epochs[block]
        origin = block * granules
        for thread in range(threads):
            lane = block * threads + thread
            if not mask[lane]:
                continue
            warp = thread >> 5
            sync = syncs[block, warp]
            first = origin + int64((addresses[lane] + uint64(immediate)) >> uint64(granule_log2))
            for at in range(first, first + count):
                if reads:
                    if shadow[at, WRITTEN] != stamp:
                        return 4 * lane + NOT_WRITTEN
                    if shadow[at, FLIGHT] == stamp:
                        return 4 * lane + IN_FLIGHT
                if shadow[at, W_EPOCH] == epoch:
                    # An atomic's writer is stored as -2 - thread.
                    writer = shadow[at, WRITER]
                    other_thread = writer if writer >= 0 else -2 - writer
                    ordered = other_thread >> 5 == warp and shadow[at, W_SYNC] != sync
                    if other_thread != thread and not ordered and (writes != 2 or writer >= 0):
                        other[0] = other_thread
                        return 4 * lane + RACE
                reader = shadow[at, READER]
                if not writes:
                    if shadow[at, R_EPOCH] != epoch:
                        shadow[at, READER] = thread
                        shadow[at, R_EPOCH] = epoch
                    elif reader == MANY:
                        continue
                    elif reader != thread:
                        r_warp = reader >> 5 if reader >= 0 else -2 - reader
                        shadow[at, READER] = -2 - warp if r_warp == warp else MANY
                    shadow[at, R_SYNC] = sync
                    continue
                if shadow[at, R_EPOCH] == epoch and reader != thread:
                    r_warp = reader >> 5 if reader >= 0 else -2 - reader
                    if reader == MANY or r_warp != warp or shadow[at, R_SYNC] == sync:
                        other[0] = reader if reader >= 0 else -1
                        return 4 * lane + RACE
                shadow[at, WRITER] = thread if writes == 1 else -2 - thread
                shadow[at, W_EPOCH] = epoch
                shadow[at, W_SYNC] = sync
                shadow[at, WRITTEN] = stamp
    return OK
