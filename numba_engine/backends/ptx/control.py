"""Where lanes go: branches, exits, and waiting for one another at barriers and ``.sync`` instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.ptx.cfg import BasicBlock
from numba_engine.backends.ptx.errors import PtxError
from numba_engine.backends.ptx.lanes import Mask
from numba_engine.backends.ptx.operands import BLOCK
from numba_engine.backends.ptx.parser import Immediate, Instruction, Operand

if TYPE_CHECKING:
    from numba_engine.backends.ptx.machine import Machine

Moves = Iterable[tuple[int, Mask]]


def leave(machine: Machine, block: BasicBlock) -> Callable[[Mask], Moves]:
    """What a block's lanes do at its end: pairs of (block number, lanes)."""
    end = block.terminator
    fallthrough = block.fallthrough
    if end is None:
        assert fallthrough is not None
        return lambda mask: ((fallthrough, mask),)
    if end.name == "bra":
        return _branch(machine, end, block.targets[0], fallthrough)
    if end.name == "brx":
        return _indexed_branch(machine, end, block.targets, fallthrough)
    if end.name == "trap":

        def trap(mask: Mask) -> Moves:
            stopped, rest = _split(machine, end, mask)
            if stopped is not None:
                raise machine.fault(end, "trap", "the kernel stopped itself", int(np.flatnonzero(stopped.flat)[0]))
            return () if fallthrough is None or rest is None else ((fallthrough, rest),)

        return trap

    def finish(mask: Mask) -> Moves:
        gone, rest = _split(machine, end, mask)
        if gone is not None:
            machine.exit_lanes(gone)
        return () if fallthrough is None or rest is None else ((fallthrough, rest),)

    return finish


def _split(machine: Machine, at: Instruction, mask: Mask) -> tuple[Mask | None, Mask | None]:
    """(lanes where the guard holds, the others); None stands for nobody."""
    if at.guard is None:
        return mask, None
    predicate, negated = machine.predicate(at.guard)
    if predicate.size == 1:
        return (mask, None) if bool(predicate[0, 0]) != negated else (None, mask)
    taken = mask.narrow(predicate, negated)
    if taken.count == mask.count:
        return mask, None
    if taken.count == 0:
        return None, mask
    return taken, mask.without(taken)


def _branch(machine: Machine, at: Instruction, target: int, fallthrough: int | None) -> Callable[[Mask], Moves]:
    assert fallthrough is not None

    def branch(mask: Mask) -> Moves:
        taken, rest = _split(machine, at, mask)
        if taken is None:
            return ((fallthrough, mask),)
        if rest is None:
            return ((target, mask),)
        return ((target, taken), (fallthrough, rest))

    return branch


def _indexed_branch(
    machine: Machine, at: Instruction, targets: tuple[int, ...], fallthrough: int | None
) -> Callable[[Mask], Moves]:
    index = machine.src(at.operands[0], "u32")

    def branch(mask: Mask) -> Moves:
        taken, rest = _split(machine, at, mask)
        moves = [] if rest is None or fallthrough is None else [(fallthrough, rest)]
        if taken is not None:
            outside = np.logical_and(taken.array, index >= len(targets))
            if outside.any():
                lane = int(np.flatnonzero(outside.reshape(-1))[0])
                raise machine.fault(at, "out-of-bounds", f"branch index beyond the {len(targets)} targets", lane)
            for number, target in enumerate(targets):
                lanes = Mask(np.logical_and(taken.array, index == number), machine.live)
                if lanes.count:
                    moves.append((target, lanes))
        return moves

    return branch


# ---- waiting ---------------------------------------------------------------------------------------------------------


def synchronisation(machine: Machine, at: Instruction) -> WarpSync | Barrier:
    """The waiting an instruction implies; it stands first in its block."""
    if at.name not in ("bar", "barrier"):
        has_members = at.name in ("shfl", "vote", "match", "redux", "elect")
        return WarpSync(machine, at, at.operands[-1] if has_members else Immediate(0xFFFFFFFF))
    if "warp" in at.parts:
        return WarpSync(machine, at, at.operands[0])
    return Barrier(machine, at)


class WarpSync:
    """Lanes wait until every lane named in their member mask is here or has exited."""

    def __init__(self, machine: Machine, at: Instruction, members: Operand) -> None:
        self.machine = machine
        self.at = at
        self.members = machine.src(members, "u32")
        self.names_all = isinstance(members, Immediate) and int(members.value) & 0xFFFFFFFF == 0xFFFFFFFF

    def arrive(self, index: int, mask: Mask, parked: dict[int, Mask], ready: dict[int, Mask]) -> Mask | None:
        """The lanes that go on now, None if they wait."""
        del ready
        machine = self.machine
        machine.passing.discard(index)
        waiting = parked.pop(index, None)
        if waiting is not None:
            mask = waiting.union(mask)
        live = machine.live.mask
        assert live is not None
        if mask.count != live.count or not self.names_all:
            self._check_named(mask)
            if self._missing(mask).any():
                parked[index] = mask
                return None
        if machine.shadow is not None:
            machine.syncs += mask.array.reshape(machine.num_blocks, -1, 32).any(axis=2)
        return mask

    def _missing(self, mask: Mask) -> np.ndarray:
        """[warps, 32] Per executing lane, the bits of named lanes that are alive but elsewhere."""
        live = self.machine.live.mask
        assert live is not None
        elsewhere = warp_bits(live.array) & ~warp_bits(mask.array)
        named = np.broadcast_to(self.members, mask.array.shape).reshape(-1, 32)
        return np.where(mask.array.reshape(-1, 32), named & elsewhere[:, None], np.uint32(0))

    def _check_named(self, mask: Mask) -> None:
        lane = np.arange(32, dtype=np.uint32)
        named = np.broadcast_to(self.members, mask.array.shape).reshape(-1, 32) >> lane & np.uint32(1)
        outside = mask.array.reshape(-1, 32) & (named == 0)
        if outside.any():
            first = int(np.flatnonzero(outside.reshape(-1))[0])
            raise self.machine.fault(self.at, "divergent-warp", "the lane is not in its own member mask", first)

    def resolve(self, index: int, parked: dict[int, Mask], ready: dict[int, Mask]) -> Mask | None:
        """Nothing else can run: the lanes that may go on because those they waited for have exited."""
        del ready
        return None if self._missing(parked[index]).any() else parked.pop(index)

    def complain(self, index: int, parked: dict[int, Mask]) -> PtxError:
        missing = self._missing(parked[index]).reshape(-1)
        lane = int(np.flatnonzero(missing)[0])
        absent = lane // 32 * 32 + (int(missing[lane]) & -int(missing[lane])).bit_length() - 1
        return self.machine.fault(
            self.at,
            "divergent-warp",
            f"lane {absent % 32} is named in the member mask and does not arrive; "
            + _whereabouts(self.machine, absent, parked),
            lane,
        )


class Barrier:
    """All threads of a block wait for one another; with a count, until that many arrived at the barrier's number."""

    def __init__(self, machine: Machine, at: Instruction) -> None:
        self.machine = machine
        self.at = at
        numbers = list(at.operands)
        if "red" in at.parts:
            numbers = numbers[1:-1]
        self.number = machine.src(numbers[0], "u32") if numbers else machine.constant(0, "u32")
        self.expected = machine.src(numbers[1], "u32") if len(numbers) > 1 else None

    def arrive(self, index: int, mask: Mask, parked: dict[int, Mask], ready: dict[int, Mask]) -> Mask | None:
        machine = self.machine
        if index in machine.passing:
            machine.passing.discard(index)
            return mask
        waiting = parked.pop(index, None)
        if waiting is not None:
            mask = waiting.union(mask)
        if self.expected is not None:
            return self._arrive_counted(index, mask, parked, ready)
        if mask.count != machine.num_blocks * machine.block_threads:
            complete = self._complete(mask)
            if not complete.all():
                if machine.program.may_spin and complete.any():
                    rows = _rows(complete, mask)
                    parked[index] = Mask(mask.array & ~rows, machine.live)
                    mask = Mask(mask.array & rows, machine.live)
                else:
                    parked[index] = mask
                    return None
        machine.epochs += mask.reduced(BLOCK)[:, 0]
        return mask

    def _complete(self, mask: Mask) -> np.ndarray:
        """Per block that has lanes here: are all its threads here?"""
        counts = np.count_nonzero(mask.array, axis=1)
        return counts[counts > 0] == self.machine.block_threads

    def _arrive_counted(self, index: int, mask: Mask, parked: dict[int, Mask], ready: dict[int, Mask]) -> Mask | None:
        machine = self.machine
        assert self.expected is not None
        number = int(self.number.flat[0])
        arrived = np.count_nonzero(mask.array, axis=1) + machine.arrivals.get(number, 0)
        others = [i for i in parked if machine.waits_at(i, number)]
        for other in others:
            arrived = arrived + np.count_nonzero(parked[other].array, axis=1)
        enough = arrived >= int(self.expected.flat[0])
        here = mask.reduced(BLOCK)[:, 0]
        if not enough[here].all():
            parked[index] = mask
            return None
        for other in others:
            ready[other] = parked.pop(other)
            machine.passing.add(other)
        machine.arrivals.pop(number, None)
        machine.epochs += here
        return mask

    def resolve(self, index: int, parked: dict[int, Mask], ready: dict[int, Mask]) -> Mask | None:
        """With arrivals that came after the lanes did, a counted barrier may be complete by now."""
        return None if self.expected is None else self._arrive_counted(index, parked.pop(index), parked, ready)

    def complain(self, index: int, parked: dict[int, Mask]) -> PtxError:
        machine = self.machine
        mask = parked[index]
        absent = mask.reduced(BLOCK) & ~mask.array
        absent[:, machine.block_threads :] = False
        lanes = np.flatnonzero(absent.reshape(-1))
        where = "fewer threads arrive than the barrier counts"
        lane = int(lanes[0]) if lanes.size else int(np.flatnonzero(mask.flat)[0])
        if lanes.size:
            where = f"not all threads of the block reach this barrier: {_whereabouts(machine, lane, parked)}"
        return machine.fault(self.at, "divergent-barrier", where, lane)


def warp_bits(array: np.ndarray) -> np.ndarray:
    """uint32 [warps]: the lanes of a boolean [blocks, threads] array as bits."""
    packed = np.packbits(array.reshape(-1, 32), axis=1, bitorder="little")
    return packed.view(np.uint32).reshape(-1)


def _rows(complete: np.ndarray, mask: Mask) -> np.ndarray:
    rows = np.zeros((mask.array.shape[0], 1), np.bool_)
    rows[mask.reduced(BLOCK)[:, 0], 0] = complete
    return rows


def _whereabouts(machine: Machine, lane: int, parked: dict[int, Mask]) -> str:
    row, column = divmod(lane, machine.threads)
    name = f"thread {machine.thread_index(column)} of block {machine.block_index(row)}"
    for index, mask in parked.items():
        if mask.array[row, column]:
            other = machine.program.blocks[index].instructions[0]
            return f"{name} waits at PTX line {other.line}: {other.text}"
    return f"{name} has exited"
