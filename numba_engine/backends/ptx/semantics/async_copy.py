"""cp.async, bulk copies and mbarrier: data that arrives later.

What a copy brings becomes visible only when its group, or the phase of its mbarrier, is waited for; until then the
target counts as in flight, and reading it is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numba import njit

from numba_engine.backends.ptx import counters, memory
from numba_engine.backends.ptx.lanes import Mask
from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.memory import FLIGHT, GLOBAL_BASE, W_EPOCH, W_SYNC, WRITER, WRITTEN
from numba_engine.backends.ptx.parser import Instruction, Operand, Register
from numba_engine.backends.ptx.registry import Op, opcode
from numba_engine.backends.ptx.semantics.load_store import BOTH, Access, describe_global, describe_shared


@dataclass(slots=True, eq=False)
class _Copies:
    """What one cp.async of many lanes brings: per lane, where to, and the bytes."""

    lanes: np.ndarray
    positions: np.ndarray
    """Byte offsets into the shared memory of all blocks."""
    data: np.ndarray


@dataclass(slots=True, eq=False)
class _Group:
    committed: np.ndarray
    """bool per lane: whose group this still is."""
    copies: list[_Copies]


@dataclass(slots=True, eq=False)
class _Bulk:
    row: int
    thread: int
    start: int
    data: np.ndarray
    phase: int


@dataclass(slots=True, eq=False)
class _MBarrier:
    """The mbarrier objects at one shared address, one a block."""

    expected: np.ndarray
    pending: np.ndarray
    phase: np.ndarray
    transactions: np.ndarray
    arriving: list[_Bulk] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _State:
    open: list[_Copies] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=list)
    mbarriers: dict[int, _MBarrier] = field(default_factory=dict)

    def clear(self) -> None:
        self.open.clear()
        self.groups.clear()
        self.mbarriers.clear()


def _state(machine: Machine) -> _State:
    if "async" not in machine.extensions:
        state = _State()
        machine.extensions["async"] = state
        machine.resets.append(state.clear)
    found: _State = machine.extensions["async"]
    return found


@opcode("cp")
def _cp(machine: Machine, at: Instruction) -> Op | None:
    parts = at.parts[1:]
    if parts[0] != "async":
        raise ValueError("only cp.async")
    if "bulk" in parts:
        return _bulk(machine, at)
    if "commit_group" in parts:
        return _commit(machine)
    if "wait_group" in parts:
        return _wait(machine, machine.src(at.operands[0], "u32"))
    if "wait_all" in parts:
        commit, wait = _commit(machine), _wait(machine, machine.constant(0, "u32"))

        def commit_and_wait(mask: Mask) -> None:
            commit(mask)
            wait(mask)

        return commit_and_wait
    if "mbarrier" in parts:
        return _copies_arrive(machine, at)
    return _copy(machine, at)


# ---- cp.async and its groups -----------------------------------------------------------------------------------------


def _copy(machine: Machine, at: Instruction) -> Op:
    size = int(machine.src(at.operands[2], "u32").flat[0])
    if size not in (4, 8, 16):
        raise ValueError("cp-size must be 4, 8 or 16")
    target = Access(machine, at, at.operands[0], "shared", size, BOTH, kind=counters.STORE)
    source = Access(machine, at, at.operands[1], "global", size, BOTH, kind=counters.LOAD)
    source_size = None
    if len(at.operands) > 3 and not (isinstance(at.operands[3], Register) and _is_policy(machine, at.operands[3])):
        source_size = machine.full(machine.src(at.operands[3], "u32"), 4)
    view = machine.arena.bytes
    state = _state(machine)

    def copy(mask: Mask) -> None:
        to = target.begin(mask, reads=False, writes=1)[0]
        lanes = np.flatnonzero(mask.flat)
        positions = (to[lanes] + target.immediate).astype(np.int64) + lanes // machine.threads * machine.shared_stride
        kept = np.full(lanes.size, size) if source_size is None else source_size()[lanes].astype(np.int64)
        # Nothing is read where the source size is 0, so the address may be anything there.
        reading = Mask(np.zeros_like(mask.array), machine.live)
        reading.array.reshape(-1)[lanes[kept > 0]] = True
        reading.count = int(np.count_nonzero(kept > 0))
        data = np.zeros((lanes.size, size), np.uint8)
        if reading.count:
            of = source.begin(reading, reads=True, writes=0)[0]
            start = (of[lanes[kept > 0]] + source.immediate - source.base).astype(np.int64)
            data[kept > 0] = view[start[:, None] + np.arange(size)]
            data[np.arange(size) >= kept[:, None]] = 0
        if machine.shadow is not None:
            _mark_flight(machine.shadow, positions, size, machine.granule_log2, machine.stamp)
        state.open.append(_Copies(lanes, positions, data))

    return copy


def _is_policy(machine: Machine, operand: Register) -> bool:
    """A cache policy is 64 bits wide, a source size 32."""
    return machine.register(operand.name).dtype.itemsize == 8


def _commit(machine: Machine) -> Op:
    state = _state(machine)

    def commit(mask: Mask) -> None:
        mine = [_taken(copies, mask.flat) for copies in state.open]
        rest = [_taken(copies, ~mask.flat) for copies in state.open]
        state.open = [copies for copies in rest if copies.lanes.size]
        state.groups.append(_Group(mask.flat.copy(), [copies for copies in mine if copies.lanes.size]))

    return commit


def _taken(copies: _Copies, lanes: np.ndarray) -> _Copies:
    chosen = lanes[copies.lanes]
    return copies if chosen.all() else _Copies(copies.lanes[chosen], copies.positions[chosen], copies.data[chosen])


def _wait(machine: Machine, allowed: np.ndarray) -> Op:
    """All but the most recent ``allowed`` groups of each lane are complete afterwards."""
    state = _state(machine)

    def wait(mask: Mask) -> None:
        newer = np.zeros(mask.flat.size, np.int32)
        keep = int(allowed.flat[0])
        for group in reversed(state.groups):
            due = mask.flat & group.committed & (newer >= keep)
            newer += group.committed
            if not due.any():
                continue
            for copies in group.copies:
                _land(machine, _taken(copies, due))
            group.copies = [_taken(copies, ~due) for copies in group.copies]
            group.committed &= ~due
        state.groups = [group for group in state.groups if group.committed.any()]

    return wait


def _land(machine: Machine, copies: _Copies) -> None:
    size = copies.data.shape[1]
    machine.shared[copies.positions[:, None] + np.arange(size)] = copies.data
    if machine.shadow is not None:
        _mark_landed(
            machine.shadow,
            copies.lanes,
            copies.positions,
            size,
            machine.granule_log2,
            machine.threads,
            machine.epochs,
            machine.syncs,
            machine.stamp,
        )


@njit(cache=True)
def _mark_flight(shadow, positions, size, granule_log2, stamp):  # type: ignore[no-untyped-def]
    for position in positions:
        for at in range(position >> granule_log2, (position + size + (1 << granule_log2) - 1) >> granule_log2):
            shadow[at, FLIGHT] = stamp


@njit(cache=True)
def _mark_landed(shadow, lanes, positions, size, granule_log2, threads, epochs, syncs, stamp):  # type: ignore[no-untyped-def]
    for index in range(lanes.size):
        block = lanes[index] // threads
        thread = lanes[index] - block * threads
        first = positions[index] >> granule_log2
        for at in range(first, first + max(1, size >> granule_log2)):
            shadow[at, FLIGHT] = 0
            shadow[at, WRITTEN] = stamp
            shadow[at, WRITER] = thread
            shadow[at, W_EPOCH] = epochs[block]
            shadow[at, W_SYNC] = syncs[block, thread >> 5]


def _copies_arrive(machine: Machine, at: Instruction) -> Op:
    """cp.async.mbarrier.arrive: here the copies are complete at once, and each lane arrives."""
    commit, wait = _commit(machine), _wait(machine, machine.constant(0, "u32"))
    arrive = _arrivals(machine, at, at.operands[0])
    counts = "noinc" in at.parts

    def run(mask: Mask) -> None:
        commit(mask)
        wait(mask)
        if counts:
            arrive(mask, 1)

    return run


# ---- mbarrier --------------------------------------------------------------------------------------------------------


@opcode("mbarrier")
def _mbarrier(machine: Machine, at: Instruction) -> Op | None:
    action = at.parts[1]
    if action == "init":
        return _init(machine, at)
    if action == "inval":
        return None
    if action == "expect_tx":
        return _expect(machine, at, at.operands[0], machine.src(at.operands[1], "u32"))
    if action in ("arrive", "arrive_drop"):
        return _arrive(machine, at)
    if action in ("test_wait", "try_wait"):
        return _test(machine, at)
    raise ValueError(f"mbarrier.{action}")


class _Places:
    """The shared addresses of the executing lanes, grouped: (address, rows of blocks, lanes) for each distinct one."""

    def __init__(self, machine: Machine, at: Instruction, address: Operand, *, nbytes: int = 8) -> None:
        self.machine = machine
        self.access = Access(machine, at, address, "shared", nbytes, BOTH, kind=counters.STORE)

    def distinct(self, mask: Mask) -> list[tuple[int, np.ndarray]]:
        access = self.access
        addresses = access.flat()
        result = memory.check_access(
            addresses, access.immediate, access.base, access.table, mask.flat, access.nbytes, 0
        )
        if result != memory.OK:
            access.fault(result, addresses)
        lanes = np.flatnonzero(mask.flat)
        where = addresses[lanes] + access.immediate
        return [(int(address), lanes[where == address]) for address in np.unique(where)]


def _init(machine: Machine, at: Instruction) -> Op:
    places = _Places(machine, at, at.operands[0])
    count = machine.full(machine.src(at.operands[1], "u32"), 4)
    state = _state(machine)

    def init(mask: Mask) -> None:
        for address, lanes in places.distinct(mask):
            if address not in state.mbarriers:
                expected, pending, phase, transactions = np.zeros((4, machine.num_blocks), np.int64)
                state.mbarriers[address] = _MBarrier(expected, pending, phase, transactions)
            barrier = state.mbarriers[address]
            rows = lanes // machine.threads
            barrier.expected[rows] = barrier.pending[rows] = count()[lanes]
            barrier.phase[rows] = 0
            barrier.transactions[rows] = 0

    return init


def _find(machine: Machine, at: Instruction, state: _State, address: int, lane: int) -> _MBarrier:
    barrier = state.mbarriers.get(address)
    if barrier is None or not barrier.expected[lane // machine.threads]:
        where = describe_shared(machine, address)
        raise machine.fault(at, "uninitialised-shared", f"no mbarrier was initialised at {where}", lane)
    return barrier


def _arrivals(machine: Machine, at: Instruction, address: Operand):  # type: ignore[no-untyped-def]
    """A function (mask, arrivals of each lane, transaction bytes of each lane) → phases before, per lane."""
    places = _Places(machine, at, address)
    state = _state(machine)

    def arrive(mask: Mask, count: int, transactions: np.ndarray | None = None) -> np.ndarray:
        before = np.zeros(mask.flat.size, np.uint64)
        for where, lanes in places.distinct(mask):
            barrier = _find(machine, at, state, where, int(lanes[0]))
            rows = lanes // machine.threads
            before[lanes] = barrier.phase[rows]
            if transactions is not None:
                np.add.at(barrier.transactions, rows, transactions[lanes])
            np.subtract.at(barrier.pending, rows, count)
            _complete_phases(barrier)
        return before

    return arrive


def _complete_phases(barrier: _MBarrier) -> None:
    done = (barrier.pending == 0) & (barrier.transactions == 0) & (barrier.expected > 0)
    barrier.phase[done] += 1
    barrier.pending[done] = barrier.expected[done]


def _arrive(machine: Machine, at: Instruction) -> Op:
    target, address, *rest = at.operands
    arrive = _arrivals(machine, at, address)
    put = machine.write(machine.dst(target, "b64")) if isinstance(target, Register) else None
    expects = "expect_tx" in at.parts
    transactions = machine.full(machine.src(rest[0], "u32"), 4) if expects else None
    count = 1 if expects or not rest else int(machine.src(rest[0], "u32").flat[0])

    def run(mask: Mask) -> None:
        before = arrive(mask, count, None if transactions is None else transactions().astype(np.int64))
        if put is not None:
            put(mask, before.reshape(machine.shape))

    return run


def _expect(machine: Machine, at: Instruction, address: Operand, nbytes: np.ndarray) -> Op:
    arrive = _arrivals(machine, at, address)
    amount = machine.full(nbytes, 4)

    def run(mask: Mask) -> None:
        arrive(mask, 0, amount().astype(np.int64))

    return run


def _test(machine: Machine, at: Instruction) -> Op:
    places = _Places(machine, at, at.operands[1])
    state = _state(machine)
    by_parity = "parity" in at.parts
    wanted = machine.full(machine.src(at.operands[2], "u32" if by_parity else "u64"), 4)
    put = machine.write(machine.dst(at.operands[0], "pred"))

    def test(mask: Mask) -> None:
        done = np.zeros(mask.flat.size, np.bool_)
        for where, lanes in places.distinct(mask):
            barrier = _find(machine, at, state, where, int(lanes[0]))
            rows = lanes // machine.threads
            phase = barrier.phase[rows].astype(np.uint64)
            want = wanted()[lanes].astype(np.uint64)
            done[lanes] = (phase & np.uint64(1)) != want if by_parity else phase != want
            _land_bulk(machine, barrier, set(rows[done[lanes]].tolist()))
        put(mask, done.reshape(machine.shape))

    return test


# ---- bulk copies -----------------------------------------------------------------------------------------------------


def _bulk(machine: Machine, at: Instruction) -> Op | None:
    parts = at.parts[1:]
    if "prefetch" in parts or "commit_group" in parts or "wait_group" in parts:
        return None
    spaces = [part.split("::")[0] for part in parts if part.split("::")[0] in ("shared", "global")]
    if spaces == ["shared", "global"]:
        return _bulk_in(machine, at)
    if spaces == ["global", "shared"]:
        return _bulk_out(machine, at)
    raise ValueError("only between global and shared memory")


def _bulk_in(machine: Machine, at: Instruction) -> Op:
    target, source, size, barrier_address = at.operands[:4]
    to = _Places(machine, at, target, nbytes=16)
    of = Access(machine, at, source, "global", 16, BOTH, kind=counters.LOAD)
    signal = _Places(machine, at, barrier_address)
    amount = machine.full(machine.src(size, "u32"), 4)
    state = _state(machine)

    def copy(mask: Mask) -> None:
        targets = {int(lane): where for where, lanes in to.distinct(mask) for lane in lanes}
        barriers = {int(lane): where for where, lanes in signal.distinct(mask) for lane in lanes}
        sources = of.flat() + of.immediate
        for lane, where in targets.items():
            row, thread = divmod(lane, machine.threads)
            nbytes = int(amount()[lane])
            barrier = _find(machine, at, state, barriers[lane], lane)
            data = machine.arena.bytes[_global_range(machine, at, int(sources[lane]), nbytes, lane)].copy()
            _check_shared_range(machine, at, where, nbytes, lane)
            if machine.shadow is not None:
                granules = _granules(machine, row, where, nbytes)
                machine.shadow[granules, FLIGHT] = machine.stamp
                machine.shadow[granules, WRITTEN] = machine.stamp
            barrier.arriving.append(_Bulk(row, thread, where, data, int(barrier.phase[row])))
            barrier.transactions[row] -= nbytes
            _count_bulk(machine, int(sources[lane]), nbytes)
            _complete_phases(barrier)

    return copy


def _land_bulk(machine: Machine, barrier: _MBarrier, rows: set[int]) -> None:
    """The copies of the phases these blocks have seen complete."""
    waiting = []
    for bulk in barrier.arriving:
        if bulk.row not in rows or bulk.phase >= barrier.phase[bulk.row]:
            waiting.append(bulk)
            continue
        start = bulk.row * machine.shared_stride + bulk.start
        machine.shared[start : start + bulk.data.size] = bulk.data
        if machine.shadow is not None:
            granules = _granules(machine, bulk.row, bulk.start, bulk.data.size)
            machine.shadow[granules, FLIGHT] = 0
            # The wait orders the copy before whatever the waiting threads do.
            machine.shadow[granules, W_EPOCH] = 0
    barrier.arriving = waiting


def _bulk_out(machine: Machine, at: Instruction) -> Op:
    target, source, size = at.operands[:3]
    to = Access(machine, at, target, "global", 16, BOTH, kind=counters.STORE)
    of = _Places(machine, at, source, nbytes=16)
    amount = machine.full(machine.src(size, "u32"), 4)

    def copy(mask: Mask) -> None:
        targets = to.flat() + to.immediate
        for where, lanes in of.distinct(mask):
            for lane in lanes.tolist():
                nbytes = int(amount()[lane])
                _check_shared_range(machine, at, where, nbytes, lane)
                start = lane // machine.threads * machine.shared_stride + where
                place = _global_range(machine, at, int(targets[lane]), nbytes, lane)
                machine.arena.bytes[place] = machine.shared[start : start + nbytes]
                if machine.arena.initialised is not None:
                    machine.arena.initialised[place] = 1

    return copy


def _global_range(machine: Machine, at: Instruction, address: int, nbytes: int, lane: int) -> slice:
    allocation = machine.arena.find(address)
    where = describe_global(machine, address)
    if allocation is None or address + nbytes > allocation.end:
        raise machine.fault(at, "out-of-bounds", f"bulk copy of {nbytes} bytes at {where}", lane)
    if address % 16 or nbytes % 16:
        raise machine.fault(
            at, "misaligned", f"bulk copy of {nbytes} bytes at {where}: both need multiples of 16", lane
        )
    return slice(address - GLOBAL_BASE, address - GLOBAL_BASE + nbytes)


def _check_shared_range(machine: Machine, at: Instruction, offset: int, nbytes: int, lane: int) -> None:
    inside = (machine.shared_table[0] <= offset) & (machine.shared_table[1] >= offset + nbytes)
    if not inside.any():
        where = describe_shared(machine, offset)
        raise machine.fault(at, "out-of-bounds", f"bulk copy of {nbytes} bytes at shared offset {where}", lane)


def _granules(machine: Machine, row: int, start: int, nbytes: int) -> slice:
    first = row * machine.granules + (start >> machine.granule_log2)
    return slice(first, first + max(1, nbytes >> machine.granule_log2))


def _count_bulk(machine: Machine, address: int, nbytes: int) -> None:
    counting = machine.counting
    if counting is None:
        return
    row = next(i for i, a in enumerate(machine.arena.allocations) if a.start <= address < a.end)
    start = address - GLOBAL_BASE
    sectors = (start + nbytes - 1) // 32 - start // 32 + 1
    counting.stats[row, counters.REQUESTS] += 1
    counting.stats[row, counters.SECTORS] += sectors
    counting.stats[row, counters.IDEAL] += -(-nbytes // 32)
    counting.stats[row, counters.BYTES] += nbytes
    counting.touched[start // 32 : start // 32 + sectors] = 1
    reads = counting.reads[start : start + nbytes]
    reads += reads < counters.MAX_READS
