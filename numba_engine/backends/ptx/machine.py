"""Runs a bound program: decodes its instructions once, then schedules lanes from block to block.

The lanes ``[blocks, threads padded to whole warps]`` of a batch of blocks run in lockstep. ``ready`` maps numbers of
basic blocks to the lanes waiting there; the machine runs the lowest number first (see ``cfg``). Lanes that wait for
others at a barrier or a ``.sync`` instruction are parked until these arrive, or until nothing else can run, which is an
error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_engine.backends.ptx.binding import NUM_SMS, Binding, Checks, Counting, Pool
from numba_engine.backends.ptx.cfg import BasicBlock
from numba_engine.backends.ptx.control import Barrier, WarpSync, leave, synchronisation
from numba_engine.backends.ptx.errors import ErrorKind, PtxError
from numba_engine.backends.ptx.lanes import Live, Mask
from numba_engine.backends.ptx.memory import Arena
from numba_engine.backends.ptx.operands import destinations, is_sync
from numba_engine.backends.ptx.parser import Instruction, Module
from numba_engine.backends.ptx.program import Program
from numba_engine.backends.ptx.registry import Op, lookup

CLOCK_PER_STEP = 8


class Machine(Binding):
    """Runs batches of ``num_blocks`` blocks of ``block_dim`` threads."""

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
        super().__init__(arena, program, symbols, num_blocks, block_dim, dynamic_shared_bytes, checks, counting, pool)
        self.module = module
        self.live = Live()
        self.epochs = np.zeros(num_blocks, np.int32)
        """Barriers each block has passed, counted on from batch to batch."""
        self.syncs = np.zeros((num_blocks, self.threads // 32), np.int32)
        """Synchronisations of each warp."""
        self.stamp = 0
        """Number of the batch."""
        self.resets: list[Callable[[], None]] = []
        """Called before each batch by what keeps state of its own."""
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

    # ---- decoding ----------------------------------------------------------------------------------------------------

    def _decode(self, block: BasicBlock, free: frozenset[str]) -> DecodedBlock:
        ops: list[Op] = []
        sync = None
        for place, instruction in enumerate(block.instructions):
            if place == 0 and is_sync(instruction):
                sync = synchronisation(self, instruction)
            # A guarded instruction keeps the old value of the lanes it skips.
            self.writes_all = instruction.guard is None and free.issuperset(destinations(instruction))
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


@dataclass(slots=True, eq=False)
class DecodedBlock:
    sync: WarpSync | Barrier | None
    ops: list[Op]
    leave: Callable[[Mask], Any]
