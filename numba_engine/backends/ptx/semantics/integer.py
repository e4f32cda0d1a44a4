"""Integer arithmetic, logic, shifts and bit fields, with the dispatch of opcodes that exist for floats too."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_engine.backends.ptx.binding import DTYPES
from numba_engine.backends.ptx.lanes import Mask
from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.operands import CARRY
from numba_engine.backends.ptx.parser import TYPE_BYTES, Immediate, Instruction
from numba_engine.backends.ptx.primitives import get
from numba_engine.backends.ptx.registry import Op, opcode
from numba_engine.backends.ptx.semantics import floating, half

_ARITHMETIC: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "min": lambda a, b, out: np.minimum(a, b, out=out),
    "max": lambda a, b, out: np.maximum(a, b, out=out),
}
_LOGIC: dict[str, Any] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def plain(machine: Machine, at: Instruction, function: Any, kind: str, num_sources: int, out: str | None = None) -> Op:
    """``function`` over sources of one type, result of the same or ``out``."""
    sources = [machine.src(operand, kind) for operand in at.operands[1 : 1 + num_sources]]
    return machine.elementwise(function, machine.dst(at.operands[0], out or kind), *sources)


@opcode("add", "sub", "min", "max")
def _add(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    if kind in half.KINDS:
        return half.arithmetic(machine, at)
    if kind in ("f32", "f64"):
        return floating.arithmetic(machine, at)
    if "cc" in at.parts:
        return _with_carry(machine, at)
    if "sat" in at.parts:
        return plain(machine, at, get(f"{at.name}_sat", "s32(s32,s32)"), "s32", 2)
    if kind in ("u16x2", "s16x2"):
        raise ValueError("packed 16-bit integers")
    return plain(machine, at, _ARITHMETIC[at.name], kind, 2)


@opcode("mul")
def _mul(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    if kind in half.KINDS:
        return half.arithmetic(machine, at)
    if kind in ("f32", "f64"):
        return floating.arithmetic(machine, at)
    if at.parts[1] == "wide":
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        return plain(machine, at, get("mul_wide", f"{wide}({kind},{kind})"), kind, 2, wide)
    if at.parts[1] == "hi":
        return plain(machine, at, get("mul_hi", f"{kind}({kind},{kind})"), kind, 2)
    return plain(machine, at, np.multiply, kind, 2)


@opcode("mad", "fma")
def _mad(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    if kind in half.KINDS:
        return half.arithmetic(machine, at)
    if kind in ("f32", "f64"):
        return floating.fused(machine, at)
    if "cc" in at.parts:
        return _with_carry(machine, at)
    if at.parts[1] == "wide":
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        function = get("mad_wide", f"{wide}({kind},{kind},{wide})")
        a, b = (machine.src(operand, kind) for operand in at.operands[1:3])
        return machine.elementwise(function, machine.dst(at.operands[0], wide), a, b, machine.src(at.operands[3], wide))
    name = {"lo": "mad_lo", "hi": "mad_hi"}[at.parts[1]]
    return plain(machine, at, get(name, f"{kind}({kind},{kind},{kind})"), kind, 3)


@opcode("addc", "subc", "madc")
def _carried(machine: Machine, at: Instruction) -> Op:
    return _with_carry(machine, at)


def _with_carry(machine: Machine, at: Instruction) -> Op:
    """Extended precision: .cc leaves the carry (the borrow of a subtraction), the names in c take it in."""
    kind = at.parts[-1]
    unsigned = "u" + kind[1:]
    takes = at.name in ("addc", "subc", "madc")
    subtracts = at.name.startswith("sub")
    if at.name in ("mad", "madc"):
        part = at.parts[1]
        high = get("mul_hi", f"{kind}({kind},{kind})")
        x, y = (machine.src(operand, kind) for operand in at.operands[1:3])
        second = machine.src(at.operands[3], unsigned)
    else:
        part = ""
        x, second = (machine.src(operand, unsigned) for operand in at.operands[1:3])
        y = x
    carry = machine.register(CARRY)
    put = machine.write(machine.dst(at.operands[0], unsigned))
    put_carry = machine.write(carry) if "cc" in at.parts else None

    def run(mask: Mask) -> None:
        first = {"": lambda: x, "lo": lambda: np.multiply(x, y), "hi": lambda: high(x, y)}[part]()
        first = first.view(second.dtype)
        entering = carry.astype(second.dtype)
        if subtracts:
            result = first - second
            out = first < second
            if takes:
                out = out | (result < entering)
                result = result - entering
        else:
            result = first + second
            out = result < first
            if takes:
                result = result + entering
                out = out | (result < entering)
        put(mask, result)
        if put_carry is not None:
            put_carry(mask, out)

    return run


@opcode("mul24", "mad24")
def _mul24(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    if at.parts[1] != "lo":
        raise ValueError("only .lo")
    count = 2 if at.name == "mul24" else 3
    name = f"{at.name}_lo_{kind[0]}"
    return plain(machine, at, get(name, f"{kind}({','.join([kind] * count)})"), kind, count)


@opcode("div", "rem")
def _div(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    if kind in ("f32", "f64"):
        return floating.divide(machine, at)
    return plain(machine, at, get(f"{at.name}_{kind[0]}", f"{kind}({kind},{kind})"), kind, 2)


@opcode("abs", "neg")
def _sign(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    if kind in half.KINDS:
        return half.sign(machine, at)
    if kind in ("f32", "f64"):
        return floating.sign(machine, at)
    return plain(machine, at, np.absolute if at.name == "abs" else np.negative, kind, 1)


@opcode("sad")
def _sad(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray, out: np.ndarray) -> None:
        np.add(np.where(a > b, a - b, b - a), c, out=out)

    return plain(machine, at, function, kind, 3)


@opcode("and", "or", "xor")
def _logic(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    if kind == "pred":
        sources = [machine.predicate(operand) for operand in at.operands[1:]]
        function = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[at.name]
        (a, not_a), (b, not_b) = sources
        if not (not_a or not_b):
            return machine.elementwise(function, machine.dst(at.operands[0], "pred"), a, b)

        def combined(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
            function(~x if not_a else x, ~y if not_b else y, out)

        return machine.elementwise(combined, machine.dst(at.operands[0], "pred"), a, b)
    return plain(machine, at, _LOGIC[at.name], kind, 2)


@opcode("not")
def _not(machine: Machine, at: Instruction) -> Op:
    return plain(machine, at, np.logical_not if at.parts[-1] == "pred" else np.invert, at.parts[-1], 1)


@opcode("cnot")
def _cnot(machine: Machine, at: Instruction) -> Op:
    return plain(machine, at, lambda a, out: np.copyto(out, a == 0, casting="unsafe"), at.parts[-1], 1)


@opcode("shl", "shr")
def _shift(machine: Machine, at: Instruction) -> Op:
    """Amounts beyond the width clamp, as NumPy's do."""
    kind = at.parts[-1]
    value = machine.src(at.operands[1], kind)
    amount = at.operands[2]
    dtype = np.dtype(DTYPES[kind])
    function: Any = np.left_shift if at.name == "shl" else np.right_shift
    out = machine.dst(at.operands[0], kind)
    if isinstance(amount, Immediate):
        by = np.array([[min(int(amount.value) & 0xFFFFFFFF, 8 * dtype.itemsize)]], dtype)
        return machine.elementwise(function, out, value, by)
    by = machine.src(amount, "u32")
    if dtype.itemsize == 4 and dtype.kind == "u":
        return machine.elementwise(function, out, value, by)
    top = np.uint32(8 * dtype.itemsize)

    def shift(a: np.ndarray, b: np.ndarray, result: np.ndarray) -> None:
        function(a, np.minimum(b, top).astype(dtype), result)

    return machine.elementwise(shift, out, value, by)


@opcode("shf")
def _funnel(machine: Machine, at: Instruction) -> Op:
    return plain(machine, at, get(f"shf_{at.parts[1]}_{at.parts[2]}", "u32(u32,u32,u32)"), "b32", 3)


@opcode("bfe")
def _bfe(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    position, length = (machine.src(operand, "u32") for operand in at.operands[2:4])
    function = get(f"bfe_{kind}", f"{kind}({kind},u32,u32)")
    out = machine.dst(at.operands[0], kind)
    return machine.elementwise(function, out, machine.src(at.operands[1], kind), position, length)


@opcode("bfi")
def _bfi(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    unsigned = "u" + kind[1:]
    position, length = (machine.src(operand, "u32") for operand in at.operands[3:5])
    a, b = (machine.src(operand, unsigned) for operand in at.operands[1:3])
    function = get(f"bfi_{kind}", f"{unsigned}({unsigned},{unsigned},u32,u32)")
    return machine.elementwise(function, machine.dst(at.operands[0], unsigned), a, b, position, length)


@opcode("bfind")
def _bfind(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    found = get(f"bfind_{kind}", f"u32({kind})")
    if "shiftamt" not in at.parts:
        return plain(machine, at, found, kind, 1, "u32")
    top = np.uint32(8 * TYPE_BYTES[kind] - 1)

    def distance(a: np.ndarray, out: np.ndarray) -> None:
        position = found(a)
        np.copyto(out, np.where(position == np.uint32(0xFFFFFFFF), position, top - position))

    return plain(machine, at, distance, kind, 1, "u32")


@opcode("clz", "popc")
def _count(machine: Machine, at: Instruction) -> Op:
    unsigned = "u" + at.parts[-1][1:]
    return plain(machine, at, get(at.name, f"u32({unsigned})"), unsigned, 1, "u32")


@opcode("brev")
def _brev(machine: Machine, at: Instruction) -> Op:
    unsigned = "u" + at.parts[-1][1:]
    return plain(machine, at, get("brev", f"{unsigned}({unsigned})"), unsigned, 1)


@opcode("prmt")
def _prmt(machine: Machine, at: Instruction) -> Op:
    if at.parts[-1] == "b32":
        return plain(machine, at, get("prmt", "u32(u32,u32,u32)"), "b32", 3)
    return plain(machine, at, get(f"prmt_{at.parts[-1]}", "u32(u32,u32,u32)"), "b32", 3)


@opcode("lop3")
def _lop3(machine: Machine, at: Instruction) -> Op:
    if at.parts[1:] != ("b32",):
        raise ValueError("only lop3.b32")
    table = machine.src(at.operands[4], "u32")
    a, b, c = (machine.src(operand, "u32") for operand in at.operands[1:4])
    lut = int(table.flat[0])
    exact = _LOP3.get(lut)
    if exact is not None:
        return machine.elementwise(exact, machine.dst(at.operands[0], "u32"), a, b, c)
    function = get("lop3", "u32(u32,u32,u32,u32)")
    return machine.elementwise(function, machine.dst(at.operands[0], "u32"), a, b, c, table)


def _and_or(a: np.ndarray, b: np.ndarray, c: np.ndarray, out: np.ndarray) -> None:
    np.bitwise_or(np.bitwise_and(a, b), c, out=out)


def _xor3(a: np.ndarray, b: np.ndarray, c: np.ndarray, out: np.ndarray) -> None:
    np.bitwise_xor(np.bitwise_xor(a, b), c, out=out)


# (a & b) | c is how nibbles become floats; a ^ b ^ c is common in hashes.
_LOP3: dict[int, Any] = {0xEA: _and_or, 0x96: _xor3}


@opcode("dp4a")
def _dp4a(machine: Machine, at: Instruction) -> Op:
    signs = at.parts[1][0] + at.parts[2][0]
    return plain(machine, at, get(f"dp4a_{signs}", "u32(u32,u32,u32)"), "b32", 3)


@opcode("dp2a")
def _dp2a(machine: Machine, at: Instruction) -> Op:
    signs = at.parts[2][0] + at.parts[3][0]
    return plain(machine, at, get(f"dp2a_{at.parts[1]}_{signs}", "u32(u32,u32,u32)"), "b32", 3)


@opcode("bmsk")
def _bmsk(machine: Machine, at: Instruction) -> Op:
    clamp = at.parts[1] == "clamp"

    def function(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        start = a.astype(np.uint64) if clamp else (a & np.uint32(31)).astype(np.uint64)
        length = b.astype(np.uint64) if clamp else (b & np.uint32(31)).astype(np.uint64)
        ones = np.left_shift(np.uint64(1), np.minimum(length, np.uint64(32))) - np.uint64(1)
        np.copyto(out, np.left_shift(ones, np.minimum(start, np.uint64(32))) & np.uint64(0xFFFFFFFF), casting="unsafe")

    return plain(machine, at, function, "u32", 2)
