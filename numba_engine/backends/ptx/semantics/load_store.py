"""ld, ldu and st: all spaces, widths, vectors; cache hints are read over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from numba_engine.backends.ptx import counters, memory
from numba_engine.backends.ptx.binding import DTYPES
from numba_engine.backends.ptx.lanes import Mask
from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.memory import GLOBAL_BASE, LOCAL_WINDOW, SHARED_WINDOW
from numba_engine.backends.ptx.operands import BLOCK, THREAD, is_non_coherent
from numba_engine.backends.ptx.parser import (
    TYPE_BYTES,
    Address,
    Immediate,
    Instruction,
    Operand,
    Register,
    Sink,
    Symbol,
    Vector,
)
from numba_engine.backends.ptx.registry import Op, opcode

BOTH = BLOCK | THREAD
_LOADS = {1: memory.load, 2: memory.load2, 4: memory.load4}


@opcode("ld", "ldu")
def _ld(machine: Machine, at: Instruction) -> Op:
    target, address = at.operands[:2]
    items = target.items if isinstance(target, Vector) else (target,)
    kind = at.parts[-1]
    space = space_of(at)
    if space == "param":
        if (
            isinstance(address, Address)
            and isinstance(address.base, Symbol)
            and address.base.name in machine.program.params
        ):
            return _load_param(machine, items, address, kind)
        space = _param_space(machine, address)
    if space == "generic":
        return by_space(machine, at, address, lambda here: _load(machine, at, items, address, kind, here))
    return _load(machine, at, items, address, kind, space)


def _load_param(machine: Machine, items: tuple[Operand, ...], address: Address, kind: str) -> Op:
    assert isinstance(address.base, Symbol)
    start = machine.program.params[address.base.name][0] + address.base.offset + address.offset
    size = TYPE_BYTES[kind]
    moves = []
    for place, item in enumerate(items):
        source = machine.params[start + place * size : start + (place + 1) * size].view(DTYPES[kind])
        moves.append((machine.wide_dst(item, kind), source))

    def load(mask: Mask) -> None:
        del mask
        for out, source in moves:
            out[...] = source[0]

    return load


def _param_space(machine: Machine, address: Operand) -> str:
    """A callee's parameter is the caller's local variable; the kernel's own live in constant memory."""
    if isinstance(address, Address) and isinstance(address.base, Symbol) and address.base.name in machine.program.local:
        return "local"
    return "const"


@opcode("st")
def _st(machine: Machine, at: Instruction) -> Op:
    address, source = at.operands[:2]
    items = source.items if isinstance(source, Vector) else (source,)
    kind = at.parts[-1]
    space = space_of(at)
    if space == "param":
        space = "local"
    if space == "generic":
        return by_space(machine, at, address, lambda here: _store(machine, at, items, address, kind, here))
    return _store(machine, at, items, address, kind, space)


def space_of(at: Instruction) -> str:
    for part in at.parts[1:]:
        name = part.split("::")[0]
        if name in ("global", "shared", "local", "const", "param"):
            return name
    return "generic"


def by_space(machine: Machine, at: Instruction, address: Operand, make: Callable[[str], Op]) -> Op:
    """Generic addresses: each lane goes where its address lies."""
    assert isinstance(address, Address)
    if address.base is None or isinstance(address.base, Symbol):
        return make(
            "local" if isinstance(address.base, Symbol) and address.base.name in machine.program.local else "global"
        )
    base = machine.src(address.base, "u64")
    # Each space writes its own lanes of the result and leaves those of the others.
    machine.writes_all = False
    ops = {space: make(space) for space in ("global", "shared", "local")}

    def run(mask: Mask) -> None:
        for space, low, high in (
            ("global", 0, SHARED_WINDOW),
            ("shared", SHARED_WINDOW, LOCAL_WINDOW),
            ("local", LOCAL_WINDOW, 1 << 63),
        ):
            here = mask.narrow(np.logical_and(base >= np.uint64(low), base < np.uint64(high)), False)
            if here.count:
                ops[space](here)

    return run


class Access:
    """One memory operand: where it points, how it is checked and counted.

    ``bits`` is the shape the access is made in; values held once for several lanes are loaded once, yet checked and
    counted for every lane.
    """

    def __init__(
        self, machine: Machine, at: Instruction, address: Operand, space: str, nbytes: int, bits: int, *, kind: int
    ) -> None:
        assert isinstance(address, Address)
        self.machine = machine
        self.at = at
        self.space = space
        self.nbytes = nbytes
        self.bits = bits
        self.kind = kind
        self.immediate = np.uint64(0)
        self._bind_address(address)
        shape = machine.shape_of(bits)
        self.threads = shape[1]
        self.size = shape[0] * shape[1]
        if space == "shared":
            self.base, self.unit, self.stride = np.uint64(0), shape[1], machine.shared_stride
            self.memory, self.table = machine.shared, machine.shared_table
        elif space == "local":
            self.base, self.unit, self.stride = np.uint64(0), 1, machine.local_stride
            self.memory, self.table = machine.local, machine.local_table
        else:
            self.base, self.unit, self.stride = np.uint64(GLOBAL_BASE), self.size, 0
            self.memory, self.table = machine.arena.bytes, machine.arena.table
        self.is_global = space not in ("shared", "local")
        self.is_non_coherent = is_non_coherent(at)

    def _bind_address(self, address: Address) -> None:
        """Sets ``flat``, a function giving the lanes' base addresses in the access's shape, and ``immediate``."""
        machine = self.machine
        offset = address.offset
        window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(self.space, 0)
        if isinstance(address.base, Register):
            array = machine.register(address.base.name)
            if space_of(self.at) == "generic":
                offset -= window
        else:
            absolute = address.offset
            if isinstance(address.base, Symbol):
                absolute += machine.address_of(address.base.name) + address.base.offset
            array, offset = np.array([[absolute]], np.uint64), 0
        self.immediate = np.uint64(offset & (2**64 - 1))
        shape = machine.shape_of(self.bits)
        if array.shape == shape and array.dtype == np.uint64:
            flat = array.reshape(-1)
            self.flat: Callable[[], np.ndarray] = lambda: flat
        else:
            copy = machine.scratch(1, self.bits, np.uint64)
            flat_copy = copy.reshape(-1)

            def broadcast() -> np.ndarray:
                np.copyto(copy, array)
                return flat_copy

            self.flat = broadcast
        self.source = array
        self.full_copy: np.ndarray | None = None

    def view(self, kind: str) -> np.ndarray:
        """The memory as elements of a type."""
        dtype = np.dtype(DTYPES[kind])
        return self.machine.arena.view(dtype) if self.is_global else self.memory.view(dtype)

    def begin(self, mask: Mask, *, reads: bool, writes: int) -> tuple[np.ndarray, np.ndarray]:
        """Check and count the access. Returns the addresses and the lanes, flat, in the access's shape."""
        addresses = self.flat()
        lanes = mask.reduced(self.bits).reshape(-1)
        table = self.machine.arena.table if self.is_global else self.table
        result = memory.check_access(addresses, self.immediate, self.base, table, lanes, self.nbytes, writes)
        if result != memory.OK:
            self.fault(result, addresses)
        machine = self.machine
        if self.is_global:
            if machine.arena.initialised is not None:
                self._check_initialised(addresses, lanes, reads, writes)
            if writes and machine.program.reads_non_coherently:
                memory.mark_written(*self._written(addresses, lanes))
            elif self.is_non_coherent:
                self._check_not_written(addresses, lanes)
            if machine.counting is not None:
                self._count_global(mask, reads, writes)
        elif self.space == "shared":
            if machine.shadow is not None:
                self._check_shared(mask, reads, writes)
            if machine.counting is not None:
                full, everyone = self._full(mask)
                counters.count_shared(full, self.immediate, everyone, self.nbytes, machine.counting.shared)
        return addresses, lanes

    def _full(self, mask: Mask) -> tuple[np.ndarray, np.ndarray]:
        """Addresses and lanes at full shape."""
        if self.bits == BOTH:
            return self.flat(), mask.flat
        if self.full_copy is None:
            self.full_copy = self.machine.scratch(2, BOTH, np.uint64)
        np.copyto(self.full_copy, self.source)
        return self.full_copy.reshape(-1), mask.flat

    def _count_global(self, mask: Mask, reads: bool, writes: int) -> None:
        counting = self.machine.counting
        assert counting is not None
        full, everyone = self._full(mask)
        table = self.machine.arena.table
        counters.count_global(full, self.immediate, self.base, table, everyone, self.nbytes, self.kind, counting.stats)
        counters.mark_sectors(full, self.immediate, self.base, everyone, self.nbytes, counting.touched)
        if reads:
            counters.count_bytes(full, self.immediate, self.base, everyone, self.nbytes, counting.reads)
        if writes:
            counters.mark_bytes(full, self.immediate, self.base, everyone, self.nbytes, counting.written)

    def _check_shared(self, mask: Mask, reads: bool, writes: int) -> None:
        machine = self.machine
        full, everyone = self._full(mask)
        other = np.zeros(1, np.int64)
        result = memory.check_shared(
            full,
            self.immediate,
            everyone,
            self.nbytes,
            machine.granule_log2,
            machine.threads,
            machine.granules,
            machine.shadow,
            machine.epochs,
            machine.syncs,
            machine.stamp,
            writes,
            reads,
            other,
        )
        if result == memory.OK:
            return
        lane, fault = divmod(int(result), 4)
        offset = int(full[lane]) + int(np.int64(self.immediate.astype(np.int64)))
        where = f"{self.nbytes} bytes at shared offset {describe_shared(machine, offset)}"
        if fault == memory.NOT_WRITTEN:
            raise machine.fault(self.at, "uninitialised-shared", f"{where} were never written", lane)
        if fault == memory.IN_FLIGHT:
            raise machine.fault(
                self.at, "async-copy-unwaited", f"{where} are the target of a cp.async that was not waited for", lane
            )
        known = f"thread {machine.thread_index(int(other[0]))}" if other[0] >= 0 else "several other threads"
        doing = "written" if writes else "read"
        raise machine.fault(
            self.at, "shared-race", f"{where} are {doing} here and touched by {known} with no barrier between", lane
        )

    def _check_initialised(self, addresses: np.ndarray, lanes: np.ndarray, reads: bool, writes: int) -> None:
        arena = self.machine.arena
        assert arena.initialised is not None
        if reads:
            result = memory.check_initialised(
                addresses, self.immediate, self.base, lanes, arena.initialised, self.nbytes
            )
            if result != memory.OK:
                self.fault(result, addresses)
        if writes:
            memory.mark(addresses, self.immediate, self.base, lanes, arena.initialised, self.nbytes)

    def _written(self, addresses: np.ndarray, lanes: np.ndarray) -> tuple[Any, ...]:
        written = self.machine.arena.written
        return (
            *(addresses, self.immediate, self.base, lanes, self.nbytes),
            *(written.stamps, written.launch, written.bounds),
        )

    def _check_not_written(self, addresses: np.ndarray, lanes: np.ndarray) -> None:
        lane = int(memory.find_written(*self._written(addresses, lanes)))
        if lane != memory.OK:
            where = describe_global(self.machine, (int(addresses[lane]) + int(self.immediate)) % 2**64)
            message = f"{self.nbytes} bytes at {where} were written by this launch; .nc may not see it"
            raise self.machine.fault(self.at, "non-coherent-read", message, lane, self.threads)

    def fault(self, result: int, addresses: np.ndarray) -> None:
        lane, fault = divmod(int(result), 4)
        machine = self.machine
        address = (int(addresses[lane]) + int(self.immediate)) % 2**64
        if self.is_global:
            where = describe_global(machine, address)
        elif self.space == "shared":
            where = f"shared offset {describe_shared(machine, address)}"
        else:
            where = f"local offset {address}"
        doing = "write" if self.kind == counters.STORE else "read"
        if fault == memory.OUT_OF_BOUNDS:
            message = f"{doing} of {self.nbytes} bytes at {where}"
        elif fault == memory.MISALIGNED:
            message = f"{doing} of {self.nbytes} bytes at {where} needs an address that is a multiple of {self.nbytes}"
        elif fault == memory.READ_ONLY:
            message = f"{doing} of {self.nbytes} bytes at {where}, which is constant"
        else:
            message = f"{self.nbytes} bytes at {where} were never written"
        raise machine.fault(self.at, memory.FAULTS[fault], message, lane, self.threads)


def describe_global(machine: Machine, address: int) -> str:
    nearest = machine.arena.nearest(address)
    if nearest is None:
        return f"address {address:#x}: nothing is allocated"
    offset = address - nearest.start
    return f"{nearest.name} byte {offset} of {nearest.nbytes} (address {address:#x})"


def describe_shared(machine: Machine, offset: int) -> str:
    if offset >= 1 << 63:
        offset -= 1 << 64
    before = [(start, name) for name, start in machine.shared_offsets.items() if start <= offset]
    if not before:
        return str(offset)
    start, name = max(before)
    return f"{name}+{offset - start}"


def _load(machine: Machine, at: Instruction, items: tuple[Operand, ...], address: Operand, kind: str, space: str) -> Op:
    outs = destinations(machine, items, kind)
    bits = machine.bits_of(*outs)
    size = TYPE_BYTES[kind]
    access = Access(machine, at, address, space, size * len(items), bits, kind=counters.LOAD)
    flats = [_plain(out).reshape(-1) for out in outs]
    element = f"u{8 * size}" if kind[0] != "s" else kind
    view = access.view(element)
    stride = access.stride // size
    unit = access.unit
    step = min(len(flats), 4)
    function = _LOADS[step]

    def load(mask: Mask) -> None:
        addresses, lanes = access.begin(mask, reads=True, writes=0)
        for first in range(0, len(flats), step):
            immediate = access.immediate + np.uint64(first * size) if first else access.immediate
            function(addresses, immediate, access.base, lanes, view, unit, stride, *flats[first : first + step])

    return load


def destinations(machine: Machine, items: tuple[Operand, ...], kind: str) -> list[np.ndarray]:
    """The registers of a vector, all of one shape; what goes to a sink goes to scratch of that shape."""
    registers = [machine.wide_dst(item, kind) for item in items if not isinstance(item, Sink)]
    bits = machine.bits_of(*registers) if registers else BOTH
    sink = machine.scratch(9, bits, DTYPES[kind])
    return [sink if isinstance(item, Sink) else registers.pop(0) for item in items]


def _plain(array: np.ndarray) -> np.ndarray:
    """Floats as the integers of their bits."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "f" else array


def _store(
    machine: Machine, at: Instruction, items: tuple[Operand, ...], address: Operand, kind: str, space: str
) -> Op:
    size = TYPE_BYTES[kind]
    unsigned = f"u{8 * size}"
    values = [
        machine.full(machine.src(item, kind if isinstance(item, Immediate) else unsigned).view(f"u{size}"), 3 + place)
        for place, item in enumerate(items)
    ]
    access = Access(machine, at, address, space, size * len(items), BOTH, kind=counters.STORE)
    view = access.view(unsigned)
    stride = access.stride // size
    unit = access.unit

    def store(mask: Mask) -> None:
        addresses, lanes = access.begin(mask, reads=False, writes=1)
        for place, value in enumerate(values):
            immediate = access.immediate + np.uint64(place * size) if place else access.immediate
            memory.store(addresses, immediate, access.base, lanes, view, unit, stride, value())

    return store
