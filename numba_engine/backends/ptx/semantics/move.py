"""mov in all its forms."""

from __future__ import annotations

import time

import numpy as np

from numba_engine.backends.ptx.lanes import Mask
from numba_engine.backends.ptx.machine import CLOCK_PER_STEP, Machine
from numba_engine.backends.ptx.parser import TYPE_BYTES, Instruction, Register, Sink, Vector
from numba_engine.backends.ptx.registry import Op, opcode
from numba_engine.backends.ptx.semantics.convert import copy


@opcode("mov")
def _mov(machine: Machine, at: Instruction) -> Op | None:
    kind = at.parts[-1]
    target, source = at.operands
    if isinstance(target, Vector):
        return _unpack(machine, target, source, kind)
    if isinstance(source, Vector):
        return _pack(machine, target, source, kind)
    if isinstance(source, Register) and source.name.startswith(("%clock", "%globaltimer")):
        return _clock(machine, target, source.name, kind)
    return machine.elementwise(copy, machine.dst(target, kind), machine.src(source, kind))


def _unpack(machine: Machine, target: Vector, source: object, kind: str) -> Op:
    size = TYPE_BYTES[kind] // len(target.items)
    whole = machine.src(source, kind)  # type: ignore[arg-type]
    ops = []
    for place, item in enumerate(target.items):
        if not isinstance(item, Sink):
            part = whole.view(f"u{size}")[:, place :: len(target.items)]
            ops.append(machine.elementwise(copy, machine.dst(item, f"b{8 * size}"), part))
    return sequence(ops)


def _pack(machine: Machine, target: object, source: Vector, kind: str) -> Op:
    size = TYPE_BYTES[kind] // len(source.items)
    whole = machine.dst(target, kind)  # type: ignore[arg-type]
    ops = []
    for place, item in enumerate(source.items):
        part = whole.view(f"u{size}")[:, place :: len(source.items)]
        ops.append(machine.elementwise(copy, part, machine.src(item, f"b{8 * size}")))
    return sequence(ops)


def sequence(ops: list[Op]) -> Op:
    def run(mask: Mask) -> None:
        for op in ops:
            op(mask)

    return run


def _clock(machine: Machine, target: object, name: str, kind: str) -> Op:
    put = machine.write(machine.dst(target, kind))  # type: ignore[arg-type]
    high = name.endswith("_hi")
    bits = 8 * TYPE_BYTES[kind]

    def read(mask: Mask) -> None:
        machine.ticks += CLOCK_PER_STEP
        value = machine.ticks if name.startswith("%clock") else time.monotonic_ns()
        value = value >> 32 if high else value & ((1 << bits) - 1)
        put(mask, np.array([[value]], np.uint64))

    return read
