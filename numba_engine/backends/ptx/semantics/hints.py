"""Instructions that change no value: fences, prefetches, cache policies, waits."""

from __future__ import annotations

import numpy as np

from numba_engine.backends.ptx import counters, memory
from numba_engine.backends.ptx.lanes import Mask
from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.parser import Instruction
from numba_engine.backends.ptx.registry import Op, opcode
from numba_engine.backends.ptx.semantics.load_store import BOTH, Access


@opcode("prefetch", "prefetchu")
def _prefetch(machine: Machine, at: Instruction) -> Op:
    """Nothing is fetched or counted, but the address must lie in an array: else what is fetched is of no use."""
    access = Access(machine, at, at.operands[0], "global", 1, BOTH, kind=counters.LOAD)

    def check(mask: Mask) -> None:
        addresses = access.flat()
        result = memory.check_access(
            addresses, access.immediate, access.base, machine.arena.table, mask.reduced(BOTH).reshape(-1), 1, 0
        )
        if result != memory.OK:
            access.fault(result, addresses)

    return check


@opcode(
    "membar",
    "fence",
    "discard",
    "applypriority",
    "nanosleep",
    "griddepcontrol",
)
def _nothing(machine: Machine, at: Instruction) -> Op | None:
    """All lanes of a batch see one memory in program order, so ordering and hints have nothing to do."""
    del machine, at
    return None


@opcode("createpolicy")
def _createpolicy(machine: Machine, at: Instruction) -> Op:
    """A cache policy is an opaque value."""
    put = machine.write(machine.dst(at.operands[0], "b64"))
    policy = np.array([[1]], np.uint64)
    return lambda mask: put(mask, policy)
