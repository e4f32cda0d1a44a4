"""cvt: between integers, floats of every width, and packed small floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from numba_engine.backends.ptx.binding import DTYPES
from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.memory import LOCAL_WINDOW, SHARED_WINDOW
from numba_engine.backends.ptx.parser import TYPE_BYTES, Instruction
from numba_engine.backends.ptx.primitives import get
from numba_engine.backends.ptx.registry import Op, opcode

_MODES = {"rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}
_INTEGRAL: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_SMALL = ("e4m3x2", "e5m2x2")

Function = Callable[..., Any]


@opcode("cvt")
def _cvt(machine: Machine, at: Instruction) -> Op:
    flags, to, of = set(at.parts[1:-2]), at.parts[-2], at.parts[-1]
    if "pack" in flags or at.parts[1] == "pack":
        return _pack_integers(machine, at)
    if to in ("f16x2", "bf16x2", *_SMALL) or of in _SMALL:
        return _packed(machine, at, flags, to, of)
    if to == "tf32":
        return machine.elementwise(
            get("round_tf32", "u32(f32)"), machine.dst(at.operands[0], "u32"), machine.src(at.operands[1], "f32")
        )
    source = machine.src(at.operands[1], of)
    if _is_float(to):
        return machine.elementwise(_to_float(flags, to, of), machine.dst(at.operands[0], to), source)
    function = _float_to_integer(flags, to, of) if _is_float(of) else _integer_to_integer(flags, to)
    return machine.elementwise(function, machine.wide_dst(at.operands[0], to), source)


def _is_float(kind: str) -> bool:
    return kind in ("f16", "bf16", "f32", "f64")


def copy(a: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, a, casting="unsafe")


def _integer_to_integer(flags: set[str], to: str) -> Function:
    dtype = np.dtype(DTYPES[to])
    if "sat" in flags:
        limits = np.iinfo(dtype)

        def saturating(a: np.ndarray, out: np.ndarray) -> None:
            low = max(int(limits.min), int(np.iinfo(a.dtype).min))
            high = min(int(limits.max), int(np.iinfo(a.dtype).max))
            np.copyto(out, np.clip(a, a.dtype.type(low), a.dtype.type(high)), casting="unsafe")

        return saturating

    def convert(a: np.ndarray, out: np.ndarray) -> None:
        # Through the target type where the register is wider, so that the value is extended from it.
        np.copyto(out, a if out.dtype.itemsize == dtype.itemsize else a.astype(dtype), casting="unsafe")

    return convert


def _float_to_integer(flags: set[str], to: str, of: str) -> Function:
    """Saturates; NaN is 0, or the top bit alone where either side has 64 bits (PTX ISA 9.7.9.21)."""
    mode = next((code for name, code in _MODES.items() if name in flags), 1)
    dtype = np.dtype(DTYPES[to])
    bits = 8 * dtype.itemsize
    low = 0.0 if to[0] == "u" else -(2.0 ** (bits - 1))
    high = 2.0**bits if to[0] == "u" else 2.0 ** (bits - 1)
    nan = np.uint64(1 << (bits - 1) if of == "f64" or bits == 64 else 0)
    convert = get("to_integer", "u64(f64,s32,f64,f64,u64)")
    widen = _widener(of)
    flush = get("flush", "f32(f32)") if "ftz" in flags else None

    def function(a: np.ndarray, out: np.ndarray) -> None:
        value = widen(a)
        if flush is not None:
            value = flush(value)
        whole = convert(value.astype(np.float64), np.int32(mode), np.float64(low), np.float64(high), nan)
        np.copyto(out, whole.astype(dtype), casting="unsafe")

    return function


def _widener(of: str) -> Function:
    """To float32 (float64 stays)."""
    if of in ("f16", "bf16"):
        return get(f"widen_{of}", "f32(u16)")
    return lambda a: a


def _to_float(flags: set[str], to: str, of: str) -> Function:
    rounding = next((mode for mode in ("rz", "rm", "rp") if mode in flags), None)
    integral = next((mode for mode in _INTEGRAL if mode in flags), None)
    widen = _widener(of)
    narrow = _narrower(to, of, rounding)
    flush = get("flush", "f32(f32)") if "ftz" in flags else None
    saturates = "sat" in flags
    relu = "relu" in flags
    if to == of == "f32" and integral is None and flush is None and not saturates:
        return copy
    if not (integral or flush or saturates or relu):
        if of in ("f16", "bf16") and to == "f32":
            return widen
        if not _is_float(of) or to != of:
            return lambda a, out: narrow(widen(a), out)

    def function(a: np.ndarray, out: np.ndarray) -> None:
        value = widen(a)
        if flush is not None and value.dtype == np.float32:
            value = flush(value)
        if integral is not None:
            value = _INTEGRAL[integral](value)
        if saturates:
            value = np.where(value > 0, np.minimum(value, value.dtype.type(1)), value.dtype.type(0))
        if relu:
            value = np.where(value > 0, value, np.where(np.isnan(value), value, value.dtype.type(0)))
        narrow(value, out)
        if flush is not None and to == "f32":
            flush(out, out)

    return function


def _narrower(to: str, of: str, rounding: str | None) -> Function:
    """From the widened source into the target's array."""
    if to in ("f32", "f64"):
        if rounding is None or (to == "f64" and of not in ("u64", "s64")):
            return copy
        if to == "f64" or of in ("u64", "s64"):
            raise ValueError(f"cvt.{rounding} of 64-bit integers")
        directed = get(f"narrow_f32_{rounding}", "f32(f64)")
        return lambda a, out: directed(np.asarray(a, np.float64), out)
    if rounding in ("rm", "rp"):
        raise ValueError(f"cvt.{rounding} to .{to}")
    if rounding == "rz":
        if of in ("f64", "u64", "s64", "u32", "s32"):
            raise ValueError(f"cvt.rz of .{of} to .{to}")
        toward_zero = get(f"narrow_{to}_rz", "u16(f32)")
        return lambda a, out: toward_zero(np.asarray(a, np.float32), out)
    if of in ("f32", "f16", "bf16"):
        return get(f"narrow_{to}", "u16(f32)")
    wide = get(f"narrow_{to}_f64", "u16(f64)")
    return lambda a, out: wide(np.asarray(a, np.float64), out)


def _packed(machine: Machine, at: Instruction, flags: set[str], to: str, of: str) -> Op:
    """The first source goes to the upper half."""
    if of in _SMALL:
        if to != "f16x2":
            raise ValueError(f"cvt of .{of} to .{to}")
        function = get(f"unpack_{of[:4]}", "u32(u16)")
        source = machine.src(at.operands[1], "u16")
        if "relu" in flags:
            raise ValueError(".relu")
        return machine.elementwise(function, machine.dst(at.operands[0], "u32"), source)
    if to in _SMALL and of == "f16x2":
        function = get(f"pack_{to[:4]}_f16x2", "u16(u32)")
        return machine.elementwise(function, machine.dst(at.operands[0], "u16"), machine.src(at.operands[1], "u32"))
    if of != "f32":
        raise ValueError(f"cvt of .{of} to .{to}")
    high, low = (machine.src(operand, "f32") for operand in at.operands[1:3])
    name = f"pack_{to[:4] if to in _SMALL else to.removesuffix('x2')}" + ("_rz" if "rz" in flags else "")
    kind = "u16" if to in _SMALL else "u32"
    pack = get(name, f"{kind}(f32,f32)")
    relu = "relu" in flags
    satfinite = "satfinite" in flags and to not in _SMALL
    largest = np.float32(65504.0 if to == "f16x2" else 3.3895313892515355e38)

    def function2(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        if relu:
            a, b = (np.where(x > 0, x, np.where(np.isnan(x), x, np.float32(0))) for x in (a, b))
        if satfinite:
            a, b = (np.clip(x, -largest, largest) for x in (a, b))
        pack(a, b, out)

    return machine.elementwise(function2 if relu or satfinite else pack, machine.dst(at.operands[0], kind), high, low)


def _pack_integers(machine: Machine, at: Instruction) -> Op:
    """cvt.pack.sat: two s32 saturated into the low bits, the third operand's low half moving up."""
    _, _, sat, to, of, *rest = at.parts
    if sat != "sat" or of != "s32":
        raise ValueError("only cvt.pack.sat of .s32")
    width = 8 * TYPE_BYTES.get(to, 0) if to in TYPE_BYTES else int(to[1:])
    limits = (0, (1 << width) - 1) if to[0] == "u" else (-(1 << (width - 1)), (1 << (width - 1)) - 1)
    a, b = (machine.src(operand, "s32") for operand in at.operands[1:3])
    above = machine.src(at.operands[3], "u32") if rest else machine.constant(0, "u32")
    ones = np.uint32((1 << width) - 1)

    def function(x: np.ndarray, y: np.ndarray, c: np.ndarray, out: np.ndarray) -> None:
        high = np.clip(x, *limits).astype(np.int32).view(np.uint32) & ones
        low = np.clip(y, *limits).astype(np.int32).view(np.uint32) & ones
        moved = np.left_shift(c, np.uint32(2 * width)) if width < 16 else np.uint32(0)
        np.copyto(out, (high << np.uint32(width)) | low | moved)

    return machine.elementwise(function, machine.dst(at.operands[0], "u32"), a, b, above)


@opcode("cvta")
def _cvta(machine: Machine, at: Instruction) -> Op:
    """Global and constant addresses are generic ones; shared and local windows are shifted."""
    kind = at.parts[-1]
    base = SHARED_WINDOW if any(part.startswith("shared") for part in at.parts) else LOCAL_WINDOW
    source = machine.src(at.operands[1], kind)
    out = machine.dst(at.operands[0], kind)
    if "global" in at.parts or "const" in at.parts or "param" in at.parts:
        return machine.elementwise(copy, out, source)
    shift = np.array([[base]], np.uint64)
    function: Any = np.subtract if "to" in at.parts else np.add
    return machine.elementwise(function, out, source, shift)


@opcode("isspacep")
def _isspacep(machine: Machine, at: Instruction) -> Op:
    space = at.parts[1].split("::")[0]
    low, high = {
        "global": (0, SHARED_WINDOW),
        "const": (0, 0),
        "shared": (SHARED_WINDOW, LOCAL_WINDOW),
        "local": (LOCAL_WINDOW, 1 << 63),
    }[space]

    def function(a: np.ndarray, out: np.ndarray) -> None:
        np.logical_and(a >= np.uint64(low), a < np.uint64(high), out=out)

    return machine.elementwise(function, machine.dst(at.operands[0], "pred"), machine.src(at.operands[1], "u64"))
