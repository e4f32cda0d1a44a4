"""How many blocks of a kernel a multiprocessor holds at once (CUDA Occupancy Calculator)."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
_REGISTER_UNIT = 256
_SCHEDULERS = 4
_SYSTEM_SHARED_BYTES = 1024
"""Of every block, reserved."""


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What one multiprocessor holds at most (CUDA C++ Programming Guide, technical specifications)."""

    threads: int
    blocks: int
    shared_bytes: int
    registers: int = 65536


MULTIPROCESSORS = {
    (8, 0): Multiprocessor(threads=2048, blocks=32, shared_bytes=164 * 1024),
    (8, 9): Multiprocessor(threads=1536, blocks=24, shared_bytes=100 * 1024),
    (9, 0): Multiprocessor(threads=2048, blocks=32, shared_bytes=228 * 1024),
    (10, 0): Multiprocessor(threads=2048, blocks=32, shared_bytes=228 * 1024),
}


def resident_blocks(cc: tuple[int, int], threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks at once; registers go to warps in units of 256, warps to four schedulers. 0: it does not fit."""
    limit = MULTIPROCESSORS[cc]
    warps = -(-threads // WARP)
    registers_per_warp = -(-registers * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = limit.registers // _SCHEDULERS // registers_per_warp * _SCHEDULERS // warps
    by_shared = limit.shared_bytes // (-(-shared_bytes // 128) * 128 + _SYSTEM_SHARED_BYTES)
    return min(limit.blocks, limit.threads // (WARP * warps), by_registers, by_shared)


def occupancy(cc: tuple[int, int], threads: int, registers: int, shared_bytes: int) -> float:
    """Warps held of this kernel, over the warps that can be held."""
    warps = -(-threads // WARP)
    return resident_blocks(cc, threads, registers, shared_bytes) * warps * WARP / MULTIPROCESSORS[cc].threads
