"""set, setp, selp, slct."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.parser import TYPE_BYTES, Instruction, Sink, both_results
from numba_engine.backends.ptx.primitives import get
from numba_engine.backends.ptx.registry import Op, opcode

_ORDERED: dict[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_UNORDERED = {"equ": "eq", "neu": "ne", "ltu": "lt", "leu": "le", "gtu": "gt", "geu": "ge"}
_COMBINE: dict[str, Any] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@opcode("setp")
def _setp(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    target, complement = both_results(at.operands[0])
    if kind.endswith("x2"):
        return _setp_packed(machine, at, target, complement)
    a, b = (machine.src(operand, kind) for operand in at.operands[1:3])
    combine = next((_COMBINE[part] for part in at.parts[1:-1] if part in _COMBINE), None)
    compare = comparison(at, kind)
    if combine is None and complement is None:
        return machine.elementwise(compare, machine.dst(target, "pred"), a, b)
    other, negated = machine.predicate(at.operands[3]) if combine is not None else (machine.constant(1, "pred"), False)
    first = machine.write(machine.dst(target, "pred"))
    second = machine.write(machine.dst(complement, "pred")) if complement is not None else None

    def both(mask: Any) -> None:
        result = np.empty(np.broadcast_shapes(a.shape, b.shape), np.bool_)
        compare(a, b, result)
        with_other = ~other if negated else other.copy()
        chosen = result if combine is None else combine(result, with_other)
        if second is not None:
            second(mask, ~result if combine is None else combine(~result, with_other))
        first(mask, chosen)

    return both


def _setp_packed(machine: Machine, at: Instruction, low: Any, high: Any) -> Op:
    """p of the low halves, q of the high ones."""
    base = at.parts[-1].removesuffix("x2")
    a, b = (machine.src(operand, "u32") for operand in at.operands[1:3])
    if any(part in _COMBINE for part in at.parts[1:-1]):
        raise ValueError("packed comparison with a boolean operator")
    compare = comparison(at, "f32")
    puts = [
        (machine.write(machine.dst(operand, "pred")), get(f"widen_{half}_{base}", "f32(u32)"))
        for operand, half in ((low, "low"), (high, "high"))
        if operand is not None and not isinstance(operand, Sink)
    ]

    def both(mask: Any) -> None:
        for put, widen in puts:
            result = np.empty(np.broadcast_shapes(a.shape, b.shape), np.bool_)
            compare(widen(a), widen(b), result)
            put(mask, result)

    return both


def comparison(at: Instruction, kind: str) -> Any:
    """A function (a, b, out) that compares values of a type (16-bit floats as bits)."""
    name = next(part for part in at.parts[1:] if part in _ORDERED or part in _UNORDERED or part in ("num", "nan"))
    compare = _compare_floats(name) if kind in ("f32", "f64", "f16", "bf16") else _ORDERED[name]
    if kind in ("f16", "bf16"):
        widen = get(f"widen_{kind}", "f32(u16)")
        return lambda a, b, out: compare(widen(a), widen(b), out)
    if "ftz" in at.parts and kind == "f32":
        flush = get("flush", "f32(f32)")
        return lambda a, b, out: compare(flush(a), flush(b), out)
    return compare


def _compare_floats(name: str) -> Any:
    if name in _UNORDERED:
        # Unordered "or": true as well where either is NaN. The negation of the opposite ordered comparison.
        opposite = {"eq": "neq", "ne": "eq", "lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}[_UNORDERED[name]]
        if opposite == "neq":

            def equal_or_nan(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
                np.logical_or(a == b, np.isnan(a) | np.isnan(b), out=out)

            return equal_or_nan
        ordered = _ORDERED[opposite]

        def negation(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
            ordered(a, b, out)
            np.logical_not(out, out=out)

        return negation
    if name in ("num", "nan"):

        def orderable(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
            np.logical_or(np.isnan(a), np.isnan(b), out=out)
            if name == "num":
                np.logical_not(out, out=out)

        return orderable
    if name == "ne":

        def different_numbers(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
            np.logical_or(a < b, a > b, out=out)

        return different_numbers
    return _ORDERED[name]


@opcode("set")
def _set(machine: Machine, at: Instruction) -> Op:
    """All ones (1.0 for a float result) where the comparison holds, else 0."""
    to, kind = at.parts[-2], at.parts[-1]
    if to.endswith("x2") or kind.endswith("x2"):
        raise ValueError("packed set")
    a, b = (machine.src(operand, kind) for operand in at.operands[1:3])
    compare = comparison(at, kind)
    combine = next((_COMBINE[part] for part in at.parts[1:-2] if part in _COMBINE), None)
    other, negated = machine.predicate(at.operands[3]) if combine is not None else (machine.constant(1, "pred"), False)
    true_bits = {"f16": 0x3C00, "bf16": 0x3F80}.get(to)

    def function(x: np.ndarray, y: np.ndarray, z: np.ndarray, out: np.ndarray) -> None:
        result = np.empty(np.broadcast_shapes(x.shape, y.shape), np.bool_)
        compare(x, y, result)
        if combine is not None:
            result = combine(result, ~z if negated else z)
        if true_bits is not None:
            np.copyto(out, np.where(result, np.uint16(true_bits), np.uint16(0)))
        elif to == "f32":
            np.copyto(out, result)
        else:
            np.copyto(out, np.where(result, -1, 0), casting="unsafe")

    return machine.elementwise(function, machine.dst(at.operands[0], to), a, b, other)


@opcode("selp")
def _selp(machine: Machine, at: Instruction) -> Op:
    unsigned = f"u{8 * TYPE_BYTES[at.parts[-1]]}"
    a, b = (machine.src(operand, at.parts[-1]).view(f"u{TYPE_BYTES[at.parts[-1]]}") for operand in at.operands[1:3])
    predicate, negated = machine.predicate(at.operands[3])
    if negated:
        a, b = b, a
    select = get("select", f"{unsigned}(pred,{unsigned},{unsigned})")
    return machine.elementwise(select, machine.dst(at.operands[0], unsigned), predicate, a, b)


@opcode("slct")
def _slct(machine: Machine, at: Instruction) -> Op:
    """a where c ≥ 0, else b (NaN takes b)."""
    kind = at.parts[-2]
    a, b = (machine.src(operand, kind) for operand in at.operands[1:3])
    c = machine.src(at.operands[3], at.parts[-1])

    def function(x: np.ndarray, y: np.ndarray, z: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, np.where(z >= 0, x, y))

    return machine.elementwise(function, machine.dst(at.operands[0], kind), a, b, c)
