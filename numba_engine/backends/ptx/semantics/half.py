"""f16 and bf16 arithmetic, one by one and packed in pairs.

Each half is widened to float32, computed there and rounded back. For sums and products the second rounding is innocuous
(Figueroa 1995); the fused multiply-add goes through round-to-odd.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.parser import Instruction
from numba_engine.backends.ptx.primitives import get
from numba_engine.backends.ptx.registry import Op, opcode
from numba_engine.backends.ptx.semantics import floating

KINDS = ("f16", "bf16", "f16x2", "bf16x2")
_F32 = "f32"


def arithmetic(machine: Machine, at: Instruction) -> Op:
    """add, sub, mul, fma, min, max."""
    if at.name in ("min", "max"):
        function = get(f"{at.name}_{'nan' if 'NaN' in at.parts else 'number'}", "f32(f32,f32)")
    else:
        function = {"add": np.add, "sub": np.subtract, "mul": np.multiply}.get(at.name) or get(
            "fma_once", "f32(f32,f32,f32)"
        )
    return apply(machine, at, function)


@opcode("ex2", "tanh")
def _function(machine: Machine, at: Instruction) -> Op:
    function = get(at.name, "f32(f32)")
    return apply(machine, at, function) if at.parts[-1] in KINDS else floating.apply(machine, at, function)


def sign(machine: Machine, at: Instruction) -> Op:
    """abs and neg touch the sign bits only."""
    kind = at.parts[-1]
    signs = np.uint32(0x80008000) if kind.endswith("x2") else np.uint16(0x8000)
    mask = np.array([[~signs if at.name == "abs" else signs]])
    function: Any = np.bitwise_and if at.name == "abs" else np.bitwise_xor
    return machine.elementwise(function, machine.dst(at.operands[0], kind), machine.src(at.operands[1], kind), mask)


def apply(machine: Machine, at: Instruction, function: Any) -> Op:
    """A float32 function over f16, bf16 or pairs of them, then .sat or .relu, then the rounding back."""
    kind = at.parts[-1]
    base = kind.removesuffix("x2")
    sources = [machine.src(operand, kind) for operand in at.operands[1:]]
    out = machine.dst(at.operands[0], kind)
    saturate = get("saturate", "f32(f32)") if "sat" in at.parts else None
    relu = "relu" in at.parts
    flush = "ftz" in at.parts

    def compute(inputs: list[np.ndarray]) -> np.ndarray:
        if flush:
            inputs = [_flush_half(value, base) for value in inputs]
        result = np.asarray(function(*inputs), np.float32)
        if saturate is not None:
            result = saturate(result)
        if relu:
            # NaN stays NaN; -0 becomes +0.
            result = np.where(result > 0, result, np.where(np.isnan(result), result, np.float32(0)))
        return _flush_half(result, base) if flush else result

    if kind == base:
        widen, narrow = get(f"widen_{base}", "f32(u16)"), get(f"narrow_{base}", "u16(f32)")

        def single(*arrays: np.ndarray) -> None:
            narrow(compute([widen(a) for a in arrays[:-1]]), arrays[-1])

        return machine.elementwise(single, out, *sources)
    low, high = (get(f"widen_{part}_{base}", "f32(u32)") for part in ("low", "high"))
    pack = get(f"pack_{base}", "u32(f32,f32)")

    def packed(*arrays: np.ndarray) -> None:
        pack(compute([high(a) for a in arrays[:-1]]), compute([low(a) for a in arrays[:-1]]), arrays[-1])

    return machine.elementwise(packed, out, *sources)


def _flush_half(value: np.ndarray, base: str) -> np.ndarray:
    tiny = np.float32(2.0**-14 if base == "f16" else 2.0**-126)
    return np.where(np.abs(value) < tiny, np.copysign(np.float32(0), value), value)
