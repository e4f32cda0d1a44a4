"""What a profiler would show of a launch: traffic per array, shared-memory wavefronts, instructions by class.

A *request* is one warp executing one memory instruction. Its *sectors* are the distinct 32-byte pieces of memory it
touches; *ideal* is how many the same distinct bytes would fill. Shared memory serves 32 banks of 4 bytes per wavefront;
8- and 16-byte accesses are served a half and a quarter of the warp at a time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numba import njit, uint64

from numba_engine.backends.ptx.memory import locate

SECTOR_BYTES = 32
WIDTHS = (1, 2, 4, 8, 16, 32)

LOAD, STORE, ATOMIC = 0, 1, 2
KINDS = ("load", "store", "atomic")
REQUESTS, SECTORS, IDEAL, BYTES, BY_WIDTH = 0, 1, 2, 3, 4
FIELDS_PER_KIND = BY_WIDTH + len(WIDTHS)
NUM_FIELDS = FIELDS_PER_KIND * len(KINDS)
SHARED_REQUESTS, SHARED_WAVEFRONTS, SHARED_IDEAL, SHARED_BYTES = range(4)
MAX_READS = 65535

_CLASSES = {
    "arithmetic": "add sub mul mad fma div rem abs neg min max copysign testp mul24 mad24 sad dp4a dp2a addc subc madc",
    "special function": "sqrt rsqrt rcp ex2 lg2 sin cos tanh",
    "logic": "and or xor not cnot shl shr shf bfe bfi bfind clz popc brev prmt lop3 szext bmsk fns",
    "conversion": "cvt cvta isspacep",
    "move": "mov selp slct",
    "comparison": "set setp",
    "control": "bra brx ret exit trap call",
    "warp": "shfl vote match redux activemask elect",
    "barrier": "bar barrier membar fence mbarrier griddepcontrol nanosleep",
    "tensor": "mma ldmatrix stmatrix",
    "atomic": "atom red",
    "cache hint": "prefetch prefetchu discard applypriority createpolicy",
    "async copy": "cp",
}
CLASS_OF = {name: kind for kind, names in _CLASSES.items() for name in names.split()}


def instruction_class(parts: tuple[str, ...]) -> str:
    """Loads and stores are told apart by memory space, the rest by what they do."""
    if parts[0] in ("ld", "ldu", "st"):
        space = next((part for part in parts if part in ("global", "shared", "local", "param", "const")), "generic")
        return f"{'store' if parts[0] == 'st' else 'load'} {space}"
    return CLASS_OF.get(parts[0], "other")


@dataclass(slots=True)
class Traffic:
    """What one kind of access did to one array."""

    requests: int = 0
    sectors: int = 0
    sectors_ideal: int = 0
    bytes: int = 0
    """Asked for by lanes, the same byte as often as it is asked for."""
    bytes_by_width: dict[int, int] = field(default_factory=dict)
    """Width of a lane's access in bytes → bytes."""


@dataclass(slots=True)
class ArrayCounters:
    name: str
    nbytes: int
    load: Traffic
    store: Traffic
    atomic: Traffic
    distinct_bytes_read: int = 0
    max_reads_per_byte: int = 0
    """By lanes; counting stops at 65535."""
    distinct_sectors: int = 0
    """32-byte sectors read or written at least once: what DRAM must move in the best case."""
    address: int = 0
    """Of the allocation."""
    first_bytes_read: int = 0
    """Of distinct_bytes_read: those that no launch read since ``PtxDevice.forget_launches``."""
    first_bytes_written: int = 0
    """Distinct bytes that no launch wrote since then."""


@dataclass(slots=True)
class LaunchCounters:
    """All counters of one launch, plain values."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    lane_instructions: int = 0
    warp_instructions: int = 0
    warp_instructions_by_class: dict[str, int] = field(default_factory=dict)
    warps_by_line: dict[int, int] = field(default_factory=dict)
    """Line of the PTX → warps that executed it."""
    arrays: dict[str, ArrayCounters] = field(default_factory=dict)
    shared_requests: int = 0
    shared_wavefronts: int = 0
    shared_wavefronts_ideal: int = 0
    shared_access_bytes: int = 0

    @property
    def sectors(self) -> int:
        return sum(a.load.sectors + a.store.sectors + a.atomic.sectors for a in self.arrays.values())

    @property
    def sectors_ideal(self) -> int:
        return sum(a.load.sectors_ideal + a.store.sectors_ideal + a.atomic.sectors_ideal for a in self.arrays.values())

    @property
    def sector_efficiency(self) -> float:
        """Ideal over requested sectors, 1.0 when every access is fully coalesced."""
        return self.sectors_ideal / self.sectors if self.sectors else 1.0

    @property
    def bank_conflict_factor(self) -> float:
        """Wavefronts over the ideal, 1.0 without conflicts."""
        return self.shared_wavefronts / self.shared_wavefronts_ideal if self.shared_wavefronts_ideal else 1.0

    @property
    def dram_ideal_bytes(self) -> int:
        """Every touched sector moved once."""
        return SECTOR_BYTES * sum(array.distinct_sectors for array in self.arrays.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def traffic(row: np.ndarray, kind: int) -> Traffic:
    """One kind's part of an array's row of raw counters."""
    part = row[kind * FIELDS_PER_KIND : (kind + 1) * FIELDS_PER_KIND]
    return Traffic(
        int(part[REQUESTS]),
        int(part[SECTORS]),
        int(part[IDEAL]),
        int(part[BYTES]),
        {width: int(n) for width, n in zip(WIDTHS, part[BY_WIDTH:], strict=True) if n},
    )


@njit(cache=True, nogil=True)
def count_global(addresses, immediate, base, table, mask, nbytes, kind, stats):  # type: ignore[no-untyped-def]
    """Add a global access of every lane to ``stats`` int64 [allocations, NUM_FIELDS]. 32 lanes make a warp."""
    seen = np.empty(64, np.uint64)
    starts = np.empty(32, np.uint64)
    width = uint64(nbytes)
    begin = kind * FIELDS_PER_KIND
    width_index = 0
    while (1 << width_index) < nbytes:
        width_index += 1
    low, high, place = uint64(1), uint64(0), -1
    for first in range(0, addresses.size, 32):
        num_seen = 0
        num_starts = 0
        lanes = 0
        for lane in range(first, first + 32):
            if not mask[lane]:
                continue
            lanes += 1
            offset = addresses[lane] + uint64(immediate) - uint64(base)
            if offset < low or offset >= high:
                place = locate(table, offset)
                low, high = table[0, place], table[1, place]
            if num_starts and offset <= starts[num_starts - 1]:
                known = False
                for at in range(num_starts - 1, -1, -1):
                    if starts[at] == offset:
                        known = True
                        break
                if known:
                    continue
            starts[num_starts] = offset
            num_starts += 1
            sector = offset >> uint64(5)
            last = (offset + width - uint64(1)) >> uint64(5)
            while sector <= last:
                known = False
                for at in range(num_seen - 1, -1, -1):
                    if seen[at] == sector:
                        known = True
                        break
                if not known:
                    seen[num_seen] = sector
                    num_seen += 1
                sector += uint64(1)
        if lanes:
            stats[place, begin + REQUESTS] += 1
            stats[place, begin + SECTORS] += num_seen
            stats[place, begin + IDEAL] += (num_starts * nbytes + 31) >> 5
            stats[place, begin + BYTES] += lanes * nbytes
            stats[place, begin + BY_WIDTH + width_index] += lanes * nbytes


@njit(cache=True, nogil=True)
def count_bytes(addresses, immediate, base, mask, nbytes, counts):  # type: ignore[no-untyped-def]
    """How often each byte is read: ``counts`` uint16 over the arena."""
    for lane in range(addresses.size):
        if mask[lane]:
            offset = addresses[lane] + uint64(immediate) - uint64(base)
            for byte in range(nbytes):
                at = offset + uint64(byte)
                if counts[at] < MAX_READS:
                    counts[at] += 1


@njit(cache=True, nogil=True)
def mark_bytes(addresses, immediate, base, mask, nbytes, marks):  # type: ignore[no-untyped-def]
    """``marks`` uint8 over the arena."""
    for lane in range(addresses.size):
        if mask[lane]:
            offset = addresses[lane] + uint64(immediate) - uint64(base)
            for byte in range(nbytes):
                marks[offset + uint64(byte)] = 1


@njit(cache=True, nogil=True)
def mark_sectors(addresses, immediate, base, mask, nbytes, touched):  # type: ignore[no-untyped-def]
    """``touched`` uint8 per sector of the arena."""
    for lane in range(addresses.size):
        if mask[lane]:
            offset = addresses[lane] + uint64(immediate) - uint64(base)
            touched[offset >> uint64(5)] = 1
            touched[(offset + uint64(nbytes) - uint64(1)) >> uint64(5)] = 1


@njit(cache=True, nogil=True)
def count_shared(addresses, immediate, mask, nbytes, stats):  # type: ignore[no-untyped-def]
    """Add a shared access of every lane to ``stats`` int64 [4]."""
    group = 32 if nbytes <= 4 else (16 if nbytes == 8 else 8)
    words_per_lane = max(1, nbytes >> 2)
    per_bank = np.empty(32, np.int64)
    words = np.empty(64, np.uint64)
    for first in range(0, addresses.size, 32):
        active = 0
        for start in range(first, first + 32, group):
            per_bank[:] = 0
            num_words = 0
            lanes = 0
            for lane in range(start, start + group):
                if not mask[lane]:
                    continue
                lanes += 1
                word = (addresses[lane] + uint64(immediate)) >> uint64(2)
                for step in range(words_per_lane):
                    known = False
                    for at in range(num_words - 1, -1, -1):
                        if words[at] == word + uint64(step):
                            known = True
                            break
                    if not known:
                        words[num_words] = word + uint64(step)
                        num_words += 1
                        per_bank[int((word + uint64(step)) & uint64(31))] += 1
            if lanes:
                active += lanes
                stats[SHARED_WAVEFRONTS] += per_bank.max()
                stats[SHARED_IDEAL] += max(1, (num_words + 31) >> 5)
        if active:
            stats[SHARED_REQUESTS] += 1
            stats[SHARED_BYTES] += active * nbytes
