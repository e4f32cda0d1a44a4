"""A program bound to a number of blocks and threads: its arrays, its decoded instructions, and the scheduler.

The lanes ``[blocks, threads padded to whole warps]`` of a batch of blocks run in lockstep. ``ready`` maps numbers of
basic blocks to the lanes waiting there; the machine runs the lowest number first (see ``program``). Lanes that wait for
others at a barrier or a ``.sync`` instruction are parked until these arrive, or until nothing else can run, which is an
error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_engine.backends.ptx import counters, memory
from numba_engine.backends.ptx.control import Barrier, WarpSync, leave, synchronisation
from numba_engine.backends.ptx.errors import ErrorKind, PtxError
from numba_engine.backends.ptx.lanes import Live, Mask
from numba_engine.backends.ptx.memory import Arena
from numba_engine.backends.ptx.parser import (
    TYPE_BYTES,
    Immediate,
    Instruction,
    Module,
    Operand,
    Register,
    Symbol,
)
from numba_engine.backends.ptx.primitives import get
from numba_engine.backends.ptx.program import BLOCK, THREAD, BasicBlock, Program, destinations, is_special, is_sync
from numba_engine.backends.ptx.semantics.registry import Op, lookup

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
CLOCK_PER_STEP = 8


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


class Machine:
    """Binds a program to ``num_blocks`` blocks of ``block_dim`` threads and runs batches of that many blocks."""

    def __init__(
        self,
        arena: Arena,
        module: Module,
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
        self.module = module
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
        self.live = Live()
        self.params = np.zeros(program.param_bytes, np.uint8)
        self.param_address = symbols["%params"]
        self.specials = self._special_registers()
        self._registers: dict[str, np.ndarray] = {}
        self._constants: dict[Any, np.ndarray] = {}
        self._lay_out_shared()
        local_bytes = num_blocks * self.threads * self.local_stride
        self.local = pool.take(("local", local_bytes), local_bytes)
        self.epochs = np.zeros(num_blocks, np.int32)
        self.syncs = np.zeros((num_blocks, self.threads // 32), np.int32)
        self.resets: list[Callable[[], None]] = []
        """Called before each batch by what keeps state of its own."""
        self.stamp = 0
        self.ticks = 0
        """What %clock reads."""
        self.first_block = 0
        self.grid = (1, 1, 1)
        self.extensions: dict[str, Any] = {}
        """State of instruction groups that need some, by name."""
        self.passing: set[int] = set()
        """Blocks whose waiting lanes were let through a barrier by others."""
        self.arrivals: dict[int, np.ndarray] = {}
        """Barrier number → threads of each block that arrived without waiting."""
        self.lanes_run = np.zeros(len(program.blocks), np.int64)
        self.warps_run = np.zeros(len(program.blocks), np.int64)
        self._writes_all = False
        self.blocks = [
            self._decode(block, free) for block, free in zip(program.blocks, program.free_writes, strict=True)
        ]

    # ---- running -----------------------------------------------------------------------------------------------------

    def run(self, first_block: int, grid: tuple[int, int, int], params: np.ndarray) -> None:
        """Execute blocks ``first_block`` … of the grid, as many as the machine has and the grid still needs."""
        self._begin_batch(first_block, grid, params)
        try:
            self._run_batch()
        finally:
            # What the shadow of shared memory noted stays in the past, also when the batch failed.
            self.pool.epoch = int(self.epochs.max())

    def _run_batch(self) -> None:
        mask: Mask | None = self.live.mask
        assert mask is not None
        ready: dict[int, Mask] = {0: mask}
        parked: dict[int, Mask] = {}
        blocks = self.blocks
        counting = self.counting
        limit = self.checks.step_limit
        may_spin = self.program.may_spin
        last_run = [0] * len(blocks)
        steps = 0
        while ready or parked:
            if not ready:
                self._resolve_deadlock(parked, ready)
            steps += 1
            if steps > limit:
                self._report_endless(ready)
            if len(ready) == 1:
                index = next(iter(ready))
            elif may_spin and steps & 63 == 0:
                # A loop may be waiting for lanes that wait here: let the one that waited longest go on.
                index = min(ready, key=last_run.__getitem__)
            else:
                index = min(ready)
            last_run[index] = steps
            mask = ready.pop(index)
            block = blocks[index]
            if block.sync is not None:
                mask = block.sync.arrive(index, mask, parked, ready)
                if mask is None:
                    continue
            if counting is not None:
                self.lanes_run[index] += mask.count
                self.warps_run[index] += mask.warps
            for op in block.ops:
                op(mask)
            for target, lanes in block.leave(mask):
                waiting = ready.get(target)
                ready[target] = lanes if waiting is None else waiting.union(lanes)

    def exit_lanes(self, mask: Mask) -> None:
        live = self.live.mask
        assert live is not None
        self.live.mask = live.without(mask)

    def _begin_batch(self, first_block: int, grid: tuple[int, int, int], params: np.ndarray) -> None:
        self.first_block = first_block
        self.grid = grid
        self.params[:] = params
        numbers = np.arange(first_block, first_block + self.num_blocks, dtype=np.int64)
        gx, gy, gz = grid
        self.specials["%ctaid.x"][:, 0] = numbers % gx
        self.specials["%ctaid.y"][:, 0] = numbers // gx % gy
        self.specials["%ctaid.z"][:, 0] = numbers // (gx * gy)
        self.specials["%smid"][:, 0] = numbers % NUM_SMS
        for axis, extent in zip("xyz", grid, strict=True):
            self.specials[f"%nctaid.{axis}"][...] = extent
        alive = np.zeros(self.shape, np.bool_)
        alive[: max(0, min(self.num_blocks, gx * gy * gz - first_block)), : self.block_threads] = True
        self.live.mask = Mask(alive, self.live)
        self.passing.clear()
        self.arrivals.clear()
        self.epochs[:] = self.pool.epoch + 1
        self.syncs[:] = 0
        self.pool.stamp += 1
        self.stamp = self.pool.stamp
        for reset in self.resets:
            reset()

    def _resolve_deadlock(self, parked: dict[int, Mask], ready: dict[int, Mask]) -> None:
        """Nothing can run: let go whom late arrivals set free, or say who is missing."""
        for index in sorted(parked):
            sync = self.blocks[index].sync
            assert sync is not None
            released = sync.resolve(index, parked, ready)
            if released is not None:
                ready[index] = released
                self.passing.add(index)
                return
        index = min(parked)
        sync = self.blocks[index].sync
        assert sync is not None
        raise sync.complain(index, parked)

    def waits_at(self, index: int, number: int) -> bool:
        """Does that block start with a counted barrier of that number?"""
        sync = self.blocks[index].sync
        return isinstance(sync, Barrier) and sync.expected is not None and int(sync.number.flat[0]) == number

    def _report_endless(self, ready: dict[int, Mask]) -> None:
        index, mask = min(ready.items())
        block = self.program.blocks[index]
        at = block.terminator or (block.instructions[0] if block.instructions else None)
        raise self.fault(
            at,
            "step-limit",
            f"{self.checks.step_limit} basic blocks executed without an end: an infinite loop, or lanes waiting for "
            "a block that is not resident (launch with cooperative=True to keep all blocks of the grid resident)",
            int(np.flatnonzero(mask.flat)[0]),
        )

    def fault(
        self, at: Instruction | None, kind: ErrorKind, message: str, lane: int | None = None, width: int | None = None
    ) -> PtxError:
        """The error of a lane, numbered within rows of ``width`` (all threads unless given)."""
        block = thread = None
        if lane is not None:
            row, column = divmod(lane, width or self.threads)
            block, thread = self.block_index(row), self.thread_index(column)
        source = None
        if at is not None and at.source is not None and at.source[0] in self.module.files and at.source[1]:
            source = f"{self.module.files[at.source[0]]}:{at.source[1]}"
        return PtxError(
            kind,
            message,
            kernel=self.program.name,
            line=at.line if at else None,
            text=at.text if at else "",
            source=source,
            block=block,
            thread=thread,
        )

    def block_index(self, row: int) -> tuple[int, int, int]:
        number = self.first_block + row
        gx, gy, _ = self.grid
        return number % gx, number // gx % gy, number // (gx * gy)

    def thread_index(self, column: int) -> tuple[int, int, int]:
        bx, by, _ = self.block_dim
        return column % bx, column // bx % by, column // (bx * by)

    # ---- binding -----------------------------------------------------------------------------------------------------

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
        if program.dynamic_shared is not None:
            start = -(-(extent + (128 if extent else 0)) // 128) * 128
            self.shared_offsets[program.dynamic_shared] = start
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
        array = self.dst(operand, "pred") if kind == "pred" else None
        if array is not None:
            return array
        if not isinstance(operand, Register):
            return self.dst(operand, kind)
        register = self.register(operand.name)
        if kind[0] == "s":
            return register.view(f"i{register.dtype.itemsize}")
        return (
            self._typed(register, kind) if kind[0] == "f" and TYPE_BYTES[kind] == register.dtype.itemsize else register
        )

    def elementwise(self, function: Callable[..., Any], out: np.ndarray, *operands: np.ndarray) -> Op:
        """``function(*operands, out)`` on the lanes that execute."""
        bits = self.bits_of(out)
        if bits == 0 or self._writes_all:
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
        bits = 0 if self._writes_all else self.bits_of(out)

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

    # ---- decoding ----------------------------------------------------------------------------------------------------

    def _decode(self, block: BasicBlock, free: frozenset[str]) -> DecodedBlock:
        ops: list[Op] = []
        sync = None
        for place, instruction in enumerate(block.instructions):
            if place == 0 and is_sync(instruction):
                sync = synchronisation(self, instruction)
            # A guarded instruction keeps the old value of the lanes it skips.
            self._writes_all = instruction.guard is None and free.issuperset(destinations(instruction))
            op = self.decode(instruction)
            if op is not None:
                ops.append(op)
        return DecodedBlock(sync, ops, leave(self, block))

    def decode(self, instruction: Instruction) -> Op | None:
        decoder = lookup(instruction.name)
        if decoder is None:
            raise self.unsupported(instruction)
        try:
            op = decoder(self, instruction)
        except PtxError:
            raise
        except (TypeError, LookupError, ValueError, StopIteration) as error:
            raise self.unsupported(instruction, str(error)) from error
        if op is None or instruction.guard is None:
            return op
        predicate, negated = self.predicate(instruction.guard)

        def guarded(mask: Mask) -> None:
            narrowed = mask.narrow(predicate, negated)
            if narrowed.count:
                op(narrowed)

        return guarded

    def unsupported(self, at: Instruction, why: str = "") -> PtxError:
        detail = f"{at.opcode} is not supported" + (f": {why}" if why else "")
        return self.fault(at, "unsupported", detail)


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


@dataclass(slots=True, eq=False)
class DecodedBlock:
    sync: WarpSync | Barrier | None
    ops: list[Op]
    leave: Callable[[Mask], Any]


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

    @classmethod
    def over(cls, arena: Arena) -> Counting:
        return cls(
            np.zeros((0, counters.NUM_FIELDS), np.int64),
            np.zeros(4, np.int64),
            memory.reserve(2 * arena.capacity_bytes).view(np.uint16),
            memory.reserve(arena.capacity_bytes // counters.SECTOR_BYTES),
        )
