"""The caches between a CPU's memory and its registers, as Linux describes them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class CacheLevel:
    """All caches of one level that the process's cores use, together."""

    name: str
    """L1 (data), L2, L3."""
    count: int
    nbytes: int


def cpu_caches(cpus_folder: Path = _CPUS, cores: Iterable[int] | None = None) -> tuple[CacheLevel, ...]:
    """Nearest first; empty where the system does not say."""
    nbytes_of: dict[tuple[int, str], int] = {}
    for core in sorted(os.sched_getaffinity(0)) if cores is None else cores:
        for index in sorted((cpus_folder / f"cpu{core}" / "cache").glob("index*")):
            try:
                level, kind, size, shared_by = (
                    (index / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
                )
                if kind != "Instruction":
                    nbytes_of[int(level), shared_by] = int(size[:-1]) * _UNITS[size[-1]]
            except (OSError, ValueError, KeyError):
                continue
    levels = sorted({level for level, _ in nbytes_of})
    sizes = {level: [nbytes for (its, _), nbytes in nbytes_of.items() if its == level] for level in levels}
    return tuple(CacheLevel(f"L{level}", len(sizes[level]), sum(sizes[level])) for level in levels)
