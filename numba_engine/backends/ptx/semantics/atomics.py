"""atom and red. The lanes of one instruction take their turns in the order of their numbers."""

from __future__ import annotations

from typing import Any

from numba import njit, uint64

from numba_engine.backends.ptx import counters
from numba_engine.backends.ptx.binding import DTYPES
from numba_engine.backends.ptx.lanes import Mask
from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.parser import TYPE_BYTES, Immediate, Instruction, Operand, Vector
from numba_engine.backends.ptx.primitives import add_packed_bf16, add_packed_f16
from numba_engine.backends.ptx.registry import Op, opcode
from numba_engine.backends.ptx.semantics.load_store import BOTH, Access, by_space, space_of

_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "inc", "dec")
ADD, MIN, MAX, AND, OR, XOR, EXCH, INC, DEC = range(len(_OPERATIONS))


@njit(cache=True, nogil=True)
def _integers(addresses, immediate, base, mask, memory, unit, stride, operand, old, operation):  # type: ignore[no-untyped-def]
    size = uint64(memory.itemsize)
    for lane in range(addresses.size):
        if not mask[lane]:
            continue
        at = uint64(lane // unit) * uint64(stride) + (addresses[lane] + uint64(immediate) - uint64(base)) // size
        value = memory[at]
        by = operand[lane]
        old[lane] = value
        if operation == ADD:
            memory[at] = value + by
        elif operation == MIN:
            memory[at] = min(value, by)
        elif operation == MAX:
            memory[at] = max(value, by)
        elif operation == AND:
            memory[at] = value & by
        elif operation == OR:
            memory[at] = value | by
        elif operation == XOR:
            memory[at] = value ^ by
        elif operation == EXCH:
            memory[at] = by
        elif operation == INC:
            memory[at] = 0 if value >= by else value + 1
        else:
            memory[at] = by if value == 0 or value > by else value - 1


@njit(cache=True, nogil=True)
def _floats(addresses, immediate, base, mask, memory, unit, stride, operand, old):  # type: ignore[no-untyped-def]
    size = uint64(memory.itemsize)
    for lane in range(addresses.size):
        if mask[lane]:
            at = uint64(lane // unit) * uint64(stride) + (addresses[lane] + uint64(immediate) - uint64(base)) // size
            old[lane] = memory[at]
            memory[at] += operand[lane]


@njit(cache=True, nogil=True)
def _packed(addresses, immediate, base, mask, memory, unit, stride, operand, old, is_bf16):  # type: ignore[no-untyped-def]
    for lane in range(addresses.size):
        if mask[lane]:
            at = uint64(lane // unit) * uint64(stride) + (addresses[lane] + uint64(immediate) - uint64(base)) // uint64(
                4
            )
            value = memory[at]
            old[lane] = value
            memory[at] = add_packed_bf16(value, operand[lane]) if is_bf16 else add_packed_f16(value, operand[lane])


@njit(cache=True, nogil=True)
def _compare_and_swap(addresses, immediate, base, mask, memory, unit, stride, expected, new, old):  # type: ignore[no-untyped-def]
    size = uint64(memory.itemsize)
    for lane in range(addresses.size):
        if mask[lane]:
            at = uint64(lane // unit) * uint64(stride) + (addresses[lane] + uint64(immediate) - uint64(base)) // size
            value = memory[at]
            old[lane] = value
            if value == expected[lane]:
                memory[at] = new[lane]


@opcode("atom")
def _atom(machine: Machine, at: Instruction) -> Op:
    return _atomic(machine, at, at.operands[0], at.operands[1], at.operands[2:])


@opcode("red")
def _red(machine: Machine, at: Instruction) -> Op:
    return _atomic(machine, at, None, at.operands[0], at.operands[1:])


def _atomic(
    machine: Machine, at: Instruction, target: Operand | None, address: Operand, values: tuple[Operand, ...]
) -> Op:
    space = space_of(at)
    if space == "generic":
        return by_space(machine, at, address, lambda here: _in_space(machine, at, target, address, values, here))
    return _in_space(machine, at, target, address, values, space)


def _in_space(
    machine: Machine,
    at: Instruction,
    target: Operand | None,
    address: Operand,
    values: tuple[Operand, ...],
    space: str,
) -> Op:
    kind = at.parts[-1]
    operation = next(part for part in at.parts[1:] if part in (*_OPERATIONS, "cas"))
    if isinstance(values[0], Vector):
        raise ValueError("vector atomics")
    if kind in ("f16", "bf16", "f16x2", "bf16x2") and (operation != "add" or not kind.endswith("x2")):
        raise ValueError(f"{operation} of .{kind}")
    if kind[0] == "f" and kind in ("f32", "f64") and operation not in ("add", "exch"):
        raise ValueError(f"{operation} of .{kind}")
    size = TYPE_BYTES[kind]
    seen_as = (
        kind if kind in ("f32", "f64") and operation == "add" else ("s" if kind[0] == "s" else "u") + str(8 * size)
    )
    operands = [
        machine.full(
            machine.src(value, kind if isinstance(value, Immediate) else seen_as).view(DTYPES[seen_as]), 3 + place
        )
        for place, value in enumerate(values)
    ]
    access = Access(machine, at, address, space, size, BOTH, kind=counters.ATOMIC)
    view = access.view(seen_as)
    old = machine.scratch(6, BOTH, DTYPES[seen_as])
    old_flat = old.reshape(-1)
    put = machine.write(machine.dst(target, seen_as)) if target is not None else None
    unit, stride = access.unit, access.stride // size
    common: Any = (access.immediate, access.base)

    def run(mask: Mask) -> None:
        addresses, lanes = access.begin(mask, reads=True, writes=2)
        arguments = (addresses, *common, lanes, view, unit, stride)
        if operation == "cas":
            _compare_and_swap(*arguments, operands[0](), operands[1](), old_flat)
        elif view.dtype.kind == "f":
            _floats(*arguments, operands[0](), old_flat)
        elif kind.endswith("x2"):
            _packed(*arguments, operands[0](), old_flat, kind == "bf16x2")
        else:
            _integers(*arguments, operands[0](), old_flat, _OPERATIONS.index(operation))
        if put is not None:
            put(mask, old)

    return run
