"""mma.sync, ldmatrix and stmatrix.

Fragments (PTX ISA, "Matrix Fragments for mma.m16n8k…"): with g = lane / 4, t = lane % 4 and e elements in a 32-bit
register, element j of A's register r is A[g + 8 (r % 2), e t + j + 4 e (r / 2)], of B's register r is
B[e t + j + 4 e r, g], and C's four values are C[g + 8 (i / 2), 2 t + i % 2]. Sums of floats are taken in float64, the
addend first, and rounded once to the accumulator; the hardware's own order and precision are not documented.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from numba_engine.backends.ptx import counters
from numba_engine.backends.ptx.lanes import Mask
from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.parser import Instruction, Vector
from numba_engine.backends.ptx.primitives import get
from numba_engine.backends.ptx.registry import Op, opcode
from numba_engine.backends.ptx.semantics.load_store import BOTH, Access

_ELEMENTS = {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4, "u8": 4, "e4m3": 4, "e5m2": 4}
"""Elements in a register by type."""
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "s8": 8, "u8": 8, "e4m3": 8, "e5m2": 8}


@opcode("mma")
def _mma(machine: Machine, at: Instruction) -> Op:
    shape = next(part for part in at.parts if part.startswith("m16n8k"))
    depth = int(shape[len("m16n8k") :])
    d_kind, a_kind, b_kind, c_kind = at.parts[-4:]
    if a_kind not in _ELEMENTS or b_kind not in _ELEMENTS or "row" not in at.parts or "col" not in at.parts:
        raise ValueError("this shape or type")
    if "satfinite" in at.parts:
        raise ValueError(".satfinite")
    d, a, b, c = (_items(operand) for operand in at.operands[:4])
    elements = _ELEMENTS[a_kind]
    if len(a) != 16 * depth // 32 // elements or len(b) != 8 * depth // 32 // elements:
        raise ValueError(f"{len(a)} and {len(b)} registers for {shape}")
    a_arrays = [machine.src(item, "b32") for item in a]
    b_arrays = [machine.src(item, "b32") for item in b]
    is_integer = d_kind == "s32"
    value_dtype = np.int32 if is_integer else np.float32
    c_arrays = [machine.src(item, {"f32": "f32", "f16": "b32", "s32": "s32"}[c_kind]) for item in c]
    puts = [machine.write(machine.dst(item, {"f32": "f32", "f16": "b32", "s32": "s32"}[d_kind])) for item in d]
    scratch = [np.empty(size, np.int32 if is_integer else np.float64) for size in ((16, depth), (depth, 8), (16, 8))]

    def run(mask: Mask) -> None:
        left = _unpack(machine, a_arrays, a_kind, value_dtype)
        right = _unpack(machine, b_arrays, b_kind, value_dtype)
        if c_kind == "f16":
            addend = _unpack(machine, c_arrays, "f16", np.float32)
        else:
            addend = np.stack([np.broadcast_to(array, machine.shape).reshape(-1) for array in c_arrays])
        result = np.empty((4, left.shape[1]), value_dtype)  # of warps that do not take part, nobody asks
        active = mask.array.reshape(-1, 32).any(axis=1)
        _multiply(left, right, addend, result, active, elements, *scratch)
        if d_kind == "f16":
            pack = get("pack_f16", "u32(f32,f32)")
            outs = [pack(result[1], result[0]), pack(result[3], result[2])]
        else:
            outs = list(result)
        for put, value in zip(puts, outs, strict=True):
            put(mask, value.reshape(machine.shape))

    return run


def _items(operand: Any) -> tuple[Any, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _unpack(machine: Machine, arrays: list[np.ndarray], kind: str, dtype: Any) -> np.ndarray:
    """[registers * elements, lanes]: the elements of packed registers, in order."""
    out = []
    for array in arrays:
        flat = np.ascontiguousarray(np.broadcast_to(array, machine.shape)).reshape(-1)
        if kind in ("f16", "bf16"):
            out += [get(f"widen_{half}_{kind}", "f32(u32)")(flat) for half in ("low", "high")]
        elif kind == "tf32":
            out.append((flat & np.uint32(0xFFFFE000)).view(np.float32))
        elif kind in ("s8", "u8"):
            octets = flat.view(np.int8 if kind == "s8" else np.uint8).reshape(-1, 4)
            out += [octets[:, place].astype(dtype) for place in range(4)]
        else:
            unpack = get(f"unpack_{kind}", "u32(u16)")
            for half in range(2):
                pair = unpack(flat.view(np.uint16)[half::2])
                out += [get(f"widen_{part}_f16", "f32(u32)")(pair) for part in ("low", "high")]
    return np.stack(out)


@njit(cache=True, nogil=True)
def _multiply(left, right, addend, result, active, elements, a, b, c):  # type: ignore[no-untyped-def]
    """result = left @ right + addend, warp by warp, in the type of the scratch a [16, K], b [K, 8] and c [16, 8]."""
    for warp in range(active.size):
        if not active[warp]:
            continue
        first = 32 * warp
        _gather(left, right, addend, a, b, c, first, elements)
        for row in range(16):
            for k in range(b.shape[0]):
                factor = a[row, k]
                for column in range(8):  # side by side, each in the order of k
                    c[row, column] += factor * b[k, column]
        _scatter(c, result, first)


@njit(cache=True, nogil=True)
def _gather(left, right, addend, a, b, c, first, elements):  # type: ignore[no-untyped-def]
    """The operands of the warp whose lanes begin at ``first``, from their fragments."""
    for index in range(left.shape[0]):
        r, j = index // elements, index % elements
        for lane in range(32):
            row, k = (lane >> 2) + 8 * (r & 1), elements * (lane & 3) + j + 4 * elements * (r >> 1)
            a[row, k] = left[index, first + lane]
    for index in range(right.shape[0]):
        r, j = index // elements, index % elements
        for lane in range(32):
            b[elements * (lane & 3) + j + 4 * elements * r, lane >> 2] = right[index, first + lane]
    for i in range(4):
        for lane in range(32):
            c[(lane >> 2) + 8 * (i >> 1), 2 * (lane & 3) + (i & 1)] = addend[i, first + lane]


@njit(cache=True, nogil=True)
def _scatter(c, result, first):  # type: ignore[no-untyped-def]
    for i in range(4):
        for lane in range(32):
            result[i, first + lane] = c[(lane >> 2) + 8 * (i >> 1), 2 * (lane & 3) + (i & 1)]


# ---- ldmatrix, stmatrix ----------------------------------------------------------------------------------------------


class _Rows:
    """The 16-byte rows of ``count`` 8×8 matrices of 16-bit elements, addressed by lanes 8 m … 8 m + 7 for matrix m."""

    def __init__(self, machine: Machine, at: Instruction, address: Any, count: int, kind: int) -> None:
        self.machine = machine
        self.count = count
        self.access = Access(machine, at, address, "shared", 16, BOTH, kind=kind)
        addressing = np.zeros((1, 32), np.bool_)
        addressing[0, : 8 * count] = True
        self.addressing = addressing

    def positions(self, mask: Mask, *, reads: bool) -> np.ndarray:
        """[warps, matrices, 8 rows]: element offsets in shared memory; 0 for warps that do not take part."""
        machine = self.machine
        lanes = (mask.array.reshape(-1, 32) & self.addressing).reshape(machine.shape)
        addresses = self.access.begin(Mask(lanes, machine.live), reads=reads, writes=0 if reads else 1)[0]
        block = np.arange(lanes.size) // machine.threads
        places = (addresses + self.access.immediate).astype(np.int64) + block * machine.shared_stride
        places = np.where(lanes.reshape(-1), places, 0) >> 1
        return places.reshape(-1, 32)[:, : 8 * self.count].reshape(-1, self.count, 8)


@opcode("ldmatrix")
def _ldmatrix(machine: Machine, at: Instruction) -> Op:
    if "m8n8" not in at.parts or at.parts[-1] != "b16":
        raise ValueError("only .m8n8 of .b16")
    items = _items(at.operands[0])
    rows = _Rows(machine, at, at.operands[1], len(items), counters.LOAD)
    puts = [machine.write(machine.dst(item, "b32")) for item in items]
    transposed = "trans" in at.parts
    memory = machine.shared.view(np.uint16)
    column = np.arange(8)

    def run(mask: Mask) -> None:
        matrices = memory[rows.positions(mask, reads=True)[..., None] + column]
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        pairs = np.ascontiguousarray(matrices).view(np.uint32)
        for place, put in enumerate(puts):
            put(mask, pairs[:, place].reshape(machine.shape))

    return run


@opcode("stmatrix")
def _stmatrix(machine: Machine, at: Instruction) -> Op:
    if "m8n8" not in at.parts or at.parts[-1] != "b16":
        raise ValueError("only .m8n8 of .b16")
    items = _items(at.operands[1])
    rows = _Rows(machine, at, at.operands[0], len(items), counters.STORE)
    values = [machine.src(item, "b32") for item in items]
    transposed = "trans" in at.parts
    memory = machine.shared.view(np.uint16)
    column = np.arange(8)

    def run(mask: Mask) -> None:
        positions = rows.positions(mask, reads=False)
        active = mask.array.reshape(-1, 32).any(axis=1)
        for place, value in enumerate(values):
            flat = np.ascontiguousarray(np.broadcast_to(value, machine.shape))
            matrix = flat.view(np.uint16).reshape(-1, 8, 8)
            if transposed:
                matrix = matrix.swapaxes(1, 2)
            memory[positions[active, place][..., None] + column] = matrix[active]

    return run
