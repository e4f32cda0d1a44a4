"""A device that looks at launches: some blocks of each run on the executor, all are counted, and the compiler is asked.

So launches of real size can be looked at: of a grid of thousands of blocks a few dozen run, from the beginning of each
third, and what they did is scaled up to all of them. Blocks of one launch do the same work on other data, but for the
last ones, which may have less. What a block leaves for another (an arrival counter, a grid barrier) does not come
about, so kernels that may wait for other blocks run whole. The results of a sampled launch are worth nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numba_engine.backends.cuda.compiler import CompiledKernel, Kernel, compile_kernel
from numba_engine.backends.cuda.device import Grid
from numba_engine.backends.cuda.ptxas import Assembled, assemble
from numba_engine.backends.ptx import LaunchCounters, PtxDevice
from numba_engine.backends.ptx.counters import SECTOR_BYTES, ArrayCounters
from numba_engine.backends.ptx.program import Program
from numba_engine.kernel_lab.machine_code import Executed, executed, machine_code

_LANES = 4096
"""Lanes that run together: the size of a sample."""
_MMA = re.compile(r"\bmma\.sync\S*\.m(\d+)n(\d+)k(\d+)\.")


@dataclass(frozen=True, eq=False)
class ObservedLaunch:
    """One launch, with what its sampled blocks did and what the compiler says of the kernel."""

    label: str
    """What the caller of the backend was doing (``ObservingDevice.label``)."""
    kernel: Kernel
    compiled: CompiledKernel
    num_blocks: int
    blocks_run: int
    counters: LaunchCounters
    """Of the blocks that ran."""

    @property
    def scale(self) -> float:
        return self.num_blocks / self.blocks_run

    @property
    def shared_bytes(self) -> int:
        """Of a block, static and dynamic."""
        return self.counters.shared_bytes

    @cached_property
    def assembled(self) -> Assembled:
        return assemble(self.compiled, line_info=True)

    @cached_property
    def executed(self) -> Executed:
        """Machine instructions of the blocks that ran."""
        return executed(machine_code(self.compiled), self.counters.warps_by_line)

    @cached_property
    def tensor_flops(self) -> float:
        """Of the blocks that ran, by ``mma.sync``."""
        total = 0.0
        for number, text in enumerate(self.compiled.ptx.split("\n"), 1):
            shape = _MMA.search(text)
            if shape:
                total += 2.0 * math.prod(map(int, shape.group(1, 2, 3))) * self.counters.warps_by_line.get(number, 0)
        return total

    def arrays(self, kind: str) -> list[ArrayCounters]:
        """Those whose name begins so."""
        return [array for name, array in self.counters.arrays.items() if name.startswith(kind)]

    def reads(self, kind: str) -> float:
        """Sectors that warps read of them over the sectors they are."""
        arrays = self.arrays(kind)
        sectors = sum(-(-array.nbytes // SECTOR_BYTES) for array in arrays)
        return self.scale * sum(array.load.sectors for array in arrays) / sectors

    def wide_share(self, kind: str) -> float:
        """Of the bytes that lanes ask for of them, those in 128-bit accesses."""
        arrays = self.arrays(kind)
        wide_bytes = sum(array.load.bytes_by_width.get(16, 0) for array in arrays)
        return wide_bytes / sum(array.load.bytes for array in arrays)

    def instructions_per_byte(self, kind: str) -> float:
        """Warp instructions, machine code, a byte of them."""
        return self.scale * self.executed.instructions / sum(array.nbytes for array in self.arrays(kind))

    def array_bytes(self) -> dict[str, int]:
        """Array → bytes that the whole launch touches of it, in whole sectors, each once: what memory moves at least.

        The blocks that ran touched so much; all of them touch in proportion, but not more than there is.
        """
        return {
            name: min(
                math.ceil(array.distinct_sectors * self.scale) * SECTOR_BYTES,
                -(-array.nbytes // SECTOR_BYTES) * SECTOR_BYTES,
            )
            for name, array in self.counters.arrays.items()
        }


class ObservingDevice(PtxDevice):
    """Runs samples of launches and keeps all it sees of them in ``observed``.

    Args:
        compute_capability: what kernels are compiled for.
        wanted: kernels whose name does not pass are not run at all.
        samples: of every launch; 1 is from its beginning.
    """

    def __init__(
        self,
        compute_capability: tuple[int, int],
        *,
        wanted: Callable[[str], bool] = lambda name: True,
        samples: int = 3,
        memory_bytes: int = 1 << 33,
    ) -> None:
        super().__init__(compute_capability, memory_bytes=memory_bytes, counting=True, lanes=_LANES)
        self.observed: list[ObservedLaunch] = []
        self.label = ""
        self._wanted = wanted
        self._samples = samples
        self._blocks_run = 0

    def launch(
        self,
        kernel: Kernel,
        grid: Grid,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        if not self._wanted(kernel.name):
            return
        super().launch(kernel, grid, arguments, shared_bytes=shared_bytes, cooperative=cooperative)
        compiled = compile_kernel(kernel, self.compute_capability)
        num_blocks = grid if isinstance(grid, int) else math.prod(grid)
        launch = self.launches.pop()
        self.observed.append(ObservedLaunch(self.label, kernel, compiled, num_blocks, self._blocks_run, launch))

    def _batches(self, num_blocks: int, batch: int, program: Program) -> Iterable[int]:
        count = -(-num_blocks // batch)
        if program.may_spin or count <= self._samples:
            firsts = list(range(0, num_blocks, batch))
        else:
            firsts = [batch * (i * count // self._samples) for i in range(self._samples)]
        self._blocks_run = sum(min(batch, num_blocks - first) for first in firsts)
        return firsts
