"""The arrays a program works on: registers, constants, shared and local memory; and how an operand becomes one.

A register's array is ``[blocks or 1, threads or 1]``, by what its value may depend on (``Program.bits``). Decoders ask
for views of a PTX type and get functions that write results to the lanes that execute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_engine.backends.ptx import counters, memory
from numba_engine.backends.ptx.lanes import Mask
from numba_engine.backends.ptx.memory import Arena
from numba_engine.backends.ptx.operands import BLOCK, THREAD, is_special
from numba_engine.backends.ptx.parser import TYPE_BYTES, Immediate, Operand, Register, Symbol
from numba_engine.backends.ptx.primitives import get
from numba_engine.backends.ptx.program import Program
from numba_engine.backends.ptx.registry import Op

DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    "f16": np.uint16,
    "bf16": np.uint16,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "f32": np.float32,
    "f64": np.float64,
    **{
        f"{kind}{bits}": f"{code}{bits // 8}"
        for bits in (8, 16, 32, 64)
        for kind, code in (("b", "u"), ("u", "u"), ("s", "i"))
    },
}
NUM_SMS = 132


@dataclass(frozen=True, slots=True)
class Checks:
    """What is looked for beyond bounds and alignment, which always are."""

    shared: bool = True
    """Uninitialised reads, races and unwaited asynchronous copies in shared memory."""
    uninitialised_global: bool = False
    step_limit: int = 4_000_000
    """Basic blocks a batch may execute before it counts as an infinite loop."""


class Pool:
    """Registers, scratch and block memory, shared by all machines of a device: only one runs at a time."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[Any, ...], np.ndarray] = {}
        self.stamp = 0
        """Number of the latest batch."""
        self.epoch = 0
        """The highest barrier count any block has reached."""

    def take(self, key: tuple[Any, ...], nbytes: int) -> np.ndarray:
        if key not in self.buffers:
            self.buffers[key] = np.zeros(nbytes, np.uint8)
        return self.buffers[key]


@dataclass(slots=True, eq=False)
class Counting:
    """Raw counters of the launch in progress."""

    stats: np.ndarray
    """int64 [allocations, counters.NUM_FIELDS]."""
    shared: np.ndarray
    """int64 [4]."""
    reads: np.ndarray
    """uint16 per byte of the arena."""
    touched: np.ndarray
    """uint8 per sector of the arena."""
    written: np.ndarray
    """uint8 per byte of the arena."""
    seen_reads: np.ndarray
    """uint8 per byte of the arena: read by a launch before this one."""
    seen_writes: np.ndarray
    """As seen_reads, for writes."""
    seen_sectors: list[np.ndarray]
    """Numbers of the sectors that have such marks."""

    @classmethod
    def over(cls, arena: Arena) -> Counting:
        return cls(
            np.zeros((0, counters.NUM_FIELDS), np.int64),
            np.zeros(4, np.int64),
            memory.reserve(2 * arena.capacity_bytes).view(np.uint16),
            memory.reserve(arena.capacity_bytes // counters.SECTOR_BYTES),
            memory.reserve(arena.capacity_bytes),
            memory.reserve(arena.capacity_bytes),
            memory.reserve(arena.capacity_bytes),
            [],
        )

    def first(self, now: np.ndarray, seen: np.ndarray, sectors: np.ndarray) -> int:
        """How many bytes of the sectors are marked now and were not seen; they are seen from now on."""
        seen_by_sector = seen.reshape(-1, counters.SECTOR_BYTES)
        new = (now != 0) & (seen_by_sector[sectors] == 0)
        seen_by_sector[sectors] |= new
        return int(np.count_nonzero(new))

    def forget_seen(self) -> None:
        for sectors in self.seen_sectors:
            for seen in (self.seen_reads, self.seen_writes):
                seen.reshape(-1, counters.SECTOR_BYTES)[sectors] = 0
        self.seen_sectors.clear()


class Binding:
    """The arrays of a program for ``num_blocks`` blocks of ``block_dim`` threads."""

    def __init__(
        self,
        arena: Arena,
        program: Program,
        symbols: dict[str, int],
        num_blocks: int,
        block_dim: tuple[int, int, int],
        dynamic_shared_bytes: int,
        checks: Checks,
        counting: Counting | None,
        pool: Pool,
    ) -> None:
        self.arena = arena
        self.program = program
        self.symbols = symbols
        self.checks = checks
        self.counting = counting
        self.pool = pool
        self.num_blocks = num_blocks
        self.block_dim = block_dim
        self.block_threads = block_dim[0] * block_dim[1] * block_dim[2]
        self.threads = -(-self.block_threads // 32) * 32
        self.shape = (num_blocks, self.threads)
        self.dynamic_shared_bytes = dynamic_shared_bytes
        self.params = np.zeros(program.param_bytes, np.uint8)
        self.param_address = symbols["%params"]
        self.specials = self._special_registers()
        self._registers: dict[str, np.ndarray] = {}
        self._constants: dict[Any, np.ndarray] = {}
        self._lay_out_shared()
        local_bytes = num_blocks * self.threads * self.local_stride
        self.local = pool.take(("local", local_bytes), local_bytes)
        self.writes_all = False
        """The instruction being decoded may write every element of its result, see ``Program.free_writes``."""

    def _special_registers(self) -> dict[str, np.ndarray]:
        thread = np.arange(self.threads, dtype=np.uint32)[None, :]
        bx, by, bz = self.block_dim
        lane = thread & np.uint32(31)
        one = np.uint32(1)
        specials = {
            "%tid.x": thread % np.uint32(bx),
            "%tid.y": thread // np.uint32(bx) % np.uint32(by),
            "%tid.z": thread // np.uint32(bx * by),
            "%laneid": lane,
            "%warpid": thread >> np.uint32(5),
            "%lanemask_eq": one << lane,
            "%lanemask_lt": (one << lane) - one,
            "%lanemask_le": ((one << lane) << one) - one,
            "%lanemask_gt": ~(((one << lane) << one) - one),
            "%lanemask_ge": ~((one << lane) - one),
        }
        scalars = {
            "%ntid.x": bx,
            "%ntid.y": by,
            "%ntid.z": bz,
            "%nctaid.x": 1,
            "%nctaid.y": 1,
            "%nctaid.z": 1,
            "%nwarpid": self.threads // 32,
            "%nsmid": NUM_SMS,
            "%gridid": 1,
            "WARP_SZ": 32,
            "%dynamic_smem_size": self.dynamic_shared_bytes,
            "%total_smem_size": self.program.shared_bytes + self.dynamic_shared_bytes,
        }
        for name, value in scalars.items():
            specials[name] = np.array([[value]], np.uint32)
        for name in ("%ctaid.x", "%ctaid.y", "%ctaid.z", "%smid"):
            specials[name] = np.zeros((self.num_blocks, 1), np.uint32)
        return specials

    def _lay_out_shared(self) -> None:
        program = self.program
        ranges = [(start, start + variable.nbytes) for start, variable in program.shared.values()]
        extent = program.shared_extent
        self.shared_offsets = {name: start for name, (start, _) in program.shared.items()}
        if program.dynamic_shared:
            start = -(-(extent + (128 if extent else 0)) // 128) * 128
            self.shared_offsets.update(dict.fromkeys(program.dynamic_shared, start))
            if self.dynamic_shared_bytes:
                ranges.append((start, start + self.dynamic_shared_bytes))
            extent = start + self.dynamic_shared_bytes
        self.shared_table = _table(ranges)
        self.shared_stride = -(-extent // 16) * 16
        shared_bytes = self.num_blocks * self.shared_stride
        self.shared = self.pool.take(("shared", shared_bytes), shared_bytes)
        self.granule_log2 = program.shared_granule_log2
        self.granules = self.shared_stride >> self.granule_log2
        self.shadow: np.ndarray | None = None
        if self.checks.shared and self.granules:
            count = self.num_blocks * self.granules * memory.SHADOW_FIELDS
            shadow = self.pool.take(("shadow", self.granule_log2, count), 4 * count)
            self.shadow = shadow.view(np.int32).reshape(-1, memory.SHADOW_FIELDS)
        self.local_stride = -(-program.local_bytes // 16) * 16
        self.local_table = _table([(start, start + v.nbytes) for start, v in program.local.values()])

    def register(self, name: str) -> np.ndarray:
        """The register's array, in the unsigned type of its width (bool for predicates)."""
        if name not in self._registers:
            if name in self.program.registers:
                kind = self.program.registers[name]
                shape = self.shape_of(self.program.bits[name])
                dtype = np.dtype(np.bool_ if kind == "pred" else f"u{TYPE_BYTES[kind]}")
                slot = self.program.slots.get(name, 0)
                self._registers[name] = self._buffer(("register", self.program.bits[name], slot), shape, dtype)
            elif name in self.specials:
                self._registers[name] = self.specials[name]
            else:
                raise KeyError(name)
        return self._registers[name]

    def shape_of(self, bits: int) -> tuple[int, int]:
        return (self.num_blocks if bits & BLOCK else 1, self.threads if bits & THREAD else 1)

    def bits_of(self, *arrays: np.ndarray) -> int:
        """The shape an elementwise result of these arrays has."""
        bits = 0
        for array in arrays:
            bits |= (BLOCK if array.shape[0] > 1 else 0) | (THREAD if array.shape[1] > 1 else 0)
        return bits

    def scratch(self, number: int, bits: int, dtype: Any) -> np.ndarray:
        """A temporary; number tells those apart that one instruction needs at once."""
        return self._buffer(("scratch", number), self.shape_of(bits), np.dtype(dtype))

    def _buffer(self, use: tuple[Any, ...], shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
        nbytes = shape[0] * shape[1] * dtype.itemsize
        array = self.pool.take((*use, shape, dtype.itemsize), nbytes)
        return array.view(dtype).reshape(shape)

    def constant(self, value: int | float, kind: str) -> np.ndarray:
        key = (repr(value), kind)
        if key not in self._constants:
            dtype = np.dtype(DTYPES[kind])
            if isinstance(value, float) and dtype.kind in "ui":
                bits = np.array(value, np.float64 if dtype.itemsize == 8 else np.float32).view(
                    f"u{max(dtype.itemsize, 4)}"
                )
                array = bits.astype(dtype)
            elif dtype.kind in "ui":
                unsigned = int(value) & ((1 << 8 * dtype.itemsize) - 1)
                array = np.array(unsigned, f"u{dtype.itemsize}").view(dtype)
            elif dtype.kind == "b":
                array = np.array(bool(value))
            else:
                array = np.array(value, dtype)
            self._constants[key] = array.reshape(1, 1)
        return self._constants[key]

    def src(self, operand: Operand, kind: str) -> np.ndarray:
        """The operand as an array of a PTX type: a register's low bytes, a literal, an address."""
        match operand:
            case Register(name):
                array = self.register(name)
            case Immediate(value):
                return self.constant(value, kind)
            case Symbol(name, offset):
                return self.constant(self.address_of(name) + offset, kind)
            case _:
                raise TypeError(f"{operand} is no value")
        return self._typed(array, kind)

    def _typed(self, array: np.ndarray, kind: str) -> np.ndarray:
        dtype = np.dtype(DTYPES[kind])
        if array.dtype == dtype:
            return array
        if array.dtype.kind == "b" or dtype.kind == "b":
            raise TypeError(f"a predicate and .{kind} do not mix")
        if array.dtype.itemsize == dtype.itemsize:
            return array.view(dtype)
        if array.dtype.itemsize > dtype.itemsize:
            step = array.dtype.itemsize // dtype.itemsize
            return array.view(dtype)[:, ::step]
        raise TypeError(f"a register of {array.dtype.itemsize} bytes cannot hold .{kind}")

    def predicate(self, operand: Operand) -> tuple[np.ndarray, bool]:
        """A predicate's array and whether it is negated."""
        if isinstance(operand, Register):
            return self.src(operand, "pred"), operand.negated
        return self.src(operand, "pred"), False

    def address_of(self, name: str) -> int:
        """Where a variable lives: an offset in shared or local memory, an address in global memory."""
        program = self.program
        if name in self.shared_offsets:
            return self.shared_offsets[name]
        if name in program.local:
            return program.local[name][0]
        if name in program.params:
            return self.param_address + program.params[name][0]
        if name in self.symbols:
            return self.symbols[name]
        raise TypeError(f"{name} is declared nowhere")

    def dst(self, operand: Operand, kind: str) -> np.ndarray:
        """Where a result of a PTX type goes; a sink gets a scratch array nobody reads."""
        if isinstance(operand, Register):
            if is_special(operand.name):
                raise TypeError(f"{operand.name} cannot be written")
            return self._typed(self.register(operand.name), kind)
        return self.scratch(9, BLOCK | THREAD, DTYPES[kind])

    def wide_dst(self, operand: Operand, kind: str) -> np.ndarray:
        """The whole register, seen with the signedness of ``kind``: assigning to it extends."""
        if not isinstance(operand, Register) or kind == "pred" or TYPE_BYTES[kind] == self._width(operand):
            return self.dst(operand, kind)
        register = self.register(operand.name)
        return register.view(f"i{register.dtype.itemsize}") if kind[0] == "s" else register

    def _width(self, operand: Register) -> int:
        return self.register(operand.name).dtype.itemsize

    def elementwise(self, function: Callable[..., Any], out: np.ndarray, *operands: np.ndarray) -> Op:
        """``function(*operands, out)`` on the lanes that execute."""
        bits = self.bits_of(out)
        if bits == 0 or self.writes_all:
            return _unmasked(function, out, operands)
        temporary = self.scratch(0, bits, out.dtype)
        merge = self._merge(out, temporary)
        if len(operands) == 1:
            (a,) = operands

            def unary(mask: Mask) -> None:
                chosen = mask.select(bits)
                if chosen is None:
                    function(a, out)
                else:
                    function(a, temporary)
                    merge(chosen)

            return unary
        if len(operands) == 2:
            a, b = operands

            def binary(mask: Mask) -> None:
                chosen = mask.select(bits)
                if chosen is None:
                    function(a, b, out)
                else:
                    function(a, b, temporary)
                    merge(chosen)

            return binary

        def general(mask: Mask) -> None:
            chosen = mask.select(bits)
            if chosen is None:
                function(*operands, out)
            else:
                function(*operands, temporary)
                merge(chosen)

        return general

    def _merge(self, out: np.ndarray, temporary: np.ndarray) -> Callable[[np.ndarray], Any]:
        kind = "pred" if out.dtype.kind == "b" else f"u{8 * out.dtype.itemsize}"
        dtype = np.dtype(DTYPES[kind])
        select = get("select", f"{kind}(pred,{kind},{kind})")
        plain_out, plain_temporary = out.view(dtype), temporary.view(dtype)
        return lambda chosen: select(chosen, plain_temporary, plain_out, plain_out)

    def write(self, out: np.ndarray) -> Callable[[Mask, np.ndarray], None]:
        """A function that puts a value computed elsewhere into a register, on the lanes that execute."""
        bits = 0 if self.writes_all else self.bits_of(out)

        def put(mask: Mask, value: np.ndarray) -> None:
            chosen = mask.select(bits)
            if chosen is None:
                np.copyto(out, value, casting="unsafe")
            else:
                np.copyto(out, value, casting="unsafe", where=chosen)

        return put

    def full(self, array: np.ndarray, number: int) -> Callable[[], np.ndarray]:
        """A function giving the array at full shape, flat: itself, or a copy in scratch ``number``."""
        if array.shape == self.shape and array.flags.c_contiguous:
            flat = array.reshape(-1)
            return lambda: flat
        copy = self.scratch(number, BLOCK | THREAD, array.dtype)
        flat_copy = copy.reshape(-1)

        def broadcast() -> np.ndarray:
            np.copyto(copy, array)
            return flat_copy

        return broadcast


def _unmasked(function: Callable[..., Any], out: np.ndarray, operands: tuple[np.ndarray, ...]) -> Op:
    if len(operands) == 2:
        a, b = operands
        return lambda mask: function(a, b, out)
    return lambda mask: function(*operands, out)


def _table(ranges: list[tuple[int, int]]) -> np.ndarray:
    """Valid ranges as ``memory`` takes them: starts, ends, none read-only."""
    table = np.zeros((3, len(ranges)), np.uint64)
    for place, (start, end) in enumerate(sorted(ranges)):
        table[0, place], table[1, place] = start, end
    return table
