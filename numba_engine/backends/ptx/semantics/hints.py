"""Instructions that change no value: fences, prefetches, cache policies, waits."""

from __future__ import annotations

import numpy as np

from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.parser import Instruction
from numba_engine.backends.ptx.registry import Op, opcode


@opcode(
    "membar",
    "fence",
    "prefetch",
    "prefetchu",
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
