"""float32 and float64 arithmetic: rounding modes, flush to zero, saturation, and the approximate functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.parser import Instruction
from numba_engine.backends.ptx.primitives import get
from numba_engine.backends.ptx.registry import Op, opcode

_DIRECTED = ("rz", "rm", "rp")
_PLAIN: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
_UNARY = "f32(f32)"
_BINARY = "f32(f32,f32)"


def rounding(at: Instruction) -> str | None:
    return next((part for part in at.parts if part in _DIRECTED), None)


def arithmetic(machine: Machine, at: Instruction) -> Op:
    """add, sub, mul, min, max."""
    kind = at.parts[-1]
    if at.name in ("min", "max"):
        if "xorsign" in at.parts or len(at.operands) != 3:
            raise ValueError(".xorsign, or three sources")
        name = f"{at.name}_nan" if "NaN" in at.parts else f"{at.name}_number"
        function = get(name, f"{kind}({kind},{kind})")
    elif (mode := rounding(at)) is not None:
        function = _directed(at, mode)
    elif "ftz" in at.parts:
        function = get(f"{at.name}_ftz", _BINARY)
    else:
        function = _PLAIN[at.name]
    return apply(machine, at, function)


def fused(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    if (mode := rounding(at)) is not None:
        return apply(machine, at, _directed(at, mode))
    if "ftz" in at.parts:
        return apply(machine, at, get("fma_ftz", "f32(f32,f32,f32)"))
    return apply(machine, at, get("fma", f"{kind}({kind},{kind},{kind})"))


def divide(machine: Machine, at: Instruction) -> Op:
    mode = rounding(at)
    return apply(machine, at, np.divide if mode is None else _directed(at, mode))


def sign(machine: Machine, at: Instruction) -> Op:
    return apply(machine, at, np.absolute if at.name == "abs" else np.negative)


@opcode("sqrt")
def _sqrt(machine: Machine, at: Instruction) -> Op:
    mode = rounding(at)
    return apply(machine, at, np.sqrt if mode is None else _directed(at, mode))


@opcode("rcp")
def _rcp(machine: Machine, at: Instruction) -> Op:
    if at.parts[-1] == "f64":
        return apply(machine, at, get("rcp_f64", "f64(f64)"))
    mode = rounding(at)
    if mode is None:
        return apply(machine, at, get("rcp", _UNARY))
    divide_by = get(f"div_{mode}", _BINARY)
    one = np.ones((1, 1), np.float32)
    return apply(machine, at, lambda a, out: divide_by(one, a, out))


@opcode("rsqrt")
def _rsqrt(machine: Machine, at: Instruction) -> Op:
    if at.parts[-1] == "f64":
        return apply(machine, at, get("rsqrt_f64", "f64(f64)"))
    return apply(machine, at, get("rsqrt", _UNARY))


@opcode("lg2", "sin", "cos")
def _approximate(machine: Machine, at: Instruction) -> Op:
    return apply(machine, at, get(at.name, _UNARY))


@opcode("copysign")
def _copysign(machine: Machine, at: Instruction) -> Op:
    """The sign of a on the value of b."""
    kind = at.parts[-1]
    bits = "u32" if kind == "f32" else "u64"
    function = get(f"copysign_{kind}", f"{bits}({bits},{bits})")
    a, b = (machine.src(operand, bits) for operand in at.operands[1:3])
    return machine.elementwise(function, machine.dst(at.operands[0], bits), b, a)


@opcode("testp")
def _testp(machine: Machine, at: Instruction) -> Op:
    kind = at.parts[-1]
    tiny = np.finfo(np.float32 if kind == "f32" else np.float64).tiny
    tests: dict[str, Any] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda a, out: np.logical_not(np.isnan(a), out=out),
        "notanumber": np.isnan,
        "normal": lambda a, out: np.logical_and(np.isfinite(a), np.abs(a) >= tiny, out=out),
        "subnormal": lambda a, out: np.logical_and(a != 0, np.abs(a) < tiny, out=out),
    }
    return machine.elementwise(
        tests[at.parts[1]], machine.dst(at.operands[0], "pred"), machine.src(at.operands[1], kind)
    )


def _directed(at: Instruction, mode: str) -> Any:
    if at.parts[-1] != "f32":
        raise ValueError(f".{mode} of float64")
    if at.name == "sub":
        add = get(f"add_{mode}", _BINARY)
        return lambda a, b, out: add(a, -b, out)
    name = "fma" if at.name == "mad" else at.name
    count = {"fma": 3, "sqrt": 1}.get(name, 2)
    return get(f"{name}_{mode}", f"f32({','.join(['f32'] * count)})")


def apply(machine: Machine, at: Instruction, function: Any) -> Op:
    """The function over all sources, with .ftz (unless the function flushes by itself) and .sat around it."""
    kind = at.parts[-1]
    sources = [machine.src(operand, kind) for operand in at.operands[1:]]
    out = machine.dst(at.operands[0], kind)
    flushes = "ftz" in at.parts and kind == "f32" and "_ftz" not in getattr(function, "__name__", "")
    saturates = "sat" in at.parts
    if not flushes and not saturates:
        return machine.elementwise(function, out, *sources)
    flush = get("flush", _UNARY)
    saturate = get("saturate", _UNARY) if kind == "f32" else get("saturate_f64", "f64(f64)")

    def wrapped(*arrays: np.ndarray) -> None:
        *inputs, result = arrays
        if flushes:
            inputs = [flush(value) for value in inputs]
        function(*inputs, result)
        if flushes:
            flush(result, result)
        if saturates:
            saturate(result, result)

    return machine.elementwise(wrapped, out, *sources)
