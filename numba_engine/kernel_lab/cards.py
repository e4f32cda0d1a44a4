"""Kernel cards: what the compiler and the executor say of a kernel, and whether that is what we ask of it.

From ``ptxas -v``: registers, spills, stack, shared memory, and the occupancy they allow. From the PTX: float64, local
memory, calls. From the machine code: bytes in flight. From the executor: how well loads coalesce, shared-memory bank
conflicts, and how often each byte of a weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from numba_engine.backends.cuda.compiler import CompiledKernel
from numba_engine.backends.ptx.counters import ArrayCounters
from numba_engine.kernel_lab.observed import ObservedLaunch
from numba_engine.kernel_lab.occupancy import MULTIPROCESSORS, WARP, occupancy

COMPUTE_CAPABILITIES = tuple(MULTIPROCESSORS)
MIN_BYTES_IN_FLIGHT = 20_000
"""Of a multiprocessor, where weights are streamed: Little's law asks an H200 for 15,000, and memory seldom answers at
its mean. With one row, where nothing else can bind, it should be 25,000."""

_MIN_WIDE = 0.66
"""All but the scales, which four lanes ask for each: in Q4_0 they are a third of what is asked for."""
_FEW_SECTORS = 256
"""So few of them cost their launch, however they lie."""
_BY_DATA = {"penalties": "sectors", "sample": "bank conflicts"}
"""The data decide: penalties touch single logits wherever the history's tokens are, and the bins of the sampler's
histogram are where the logits lie."""


@dataclass(frozen=True, slots=True)
class KernelCard:
    """One kernel for one compute capability. What does not apply is None."""

    kernel: str
    cc: str
    threads: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    """Of a block, static and dynamic."""
    occupancy: float
    """Warps a multiprocessor can hold of this kernel, over the warps it can hold."""
    bytes_in_flight: float
    """Of a multiprocessor full of its blocks: loads not yet waited for, in the mean over the bytes it loads."""
    f64: int
    """Instructions (and declarations) of each kind in the PTX."""
    local: int
    calls: int
    wide_weight_share: float | None
    """Of the bytes of weights those read in 128-bit accesses, at worst, in steps of few rows."""
    weight_reads: float | None
    """Sectors of weights read over the sectors they are, at worst, with the same steps: each should be read once."""
    instructions_per_weight_byte: float | None
    """Of warps, machine code, with the same steps."""
    sectors: int
    """Of 32 bytes, that loads and stores asked for."""
    sector_efficiency: float
    bank_conflict_factor: float

    @property
    def misses(self) -> tuple[str, ...]:
        """The targets this kernel does not reach."""
        streams = self.weight_reads is not None
        checks = (
            ("spills", self.spill_bytes == 0),
            ("stack", self.stack_bytes == 0),
            ("f64", self.f64 == 0),
            ("local", self.local == 0),
            ("calls", self.calls == 0),
            ("bytes in flight", not streams or self.bytes_in_flight >= MIN_BYTES_IN_FLIGHT),
            ("weight loads", self.wide_weight_share is None or self.wide_weight_share >= _MIN_WIDE),
            ("weight reads", self.weight_reads is None or self.weight_reads <= 1.001),
            ("sectors", self.sectors < _FEW_SECTORS or self.sector_efficiency >= 0.98),
            ("bank conflicts", self.bank_conflict_factor <= 1.05),
        )
        return tuple(name for name, passed in checks if not passed and _BY_DATA.get(self.kernel) != name)


def kernel_card(
    launches: Sequence[ObservedLaunch], *, weight: str, table: str, few_rows: Sequence[ObservedLaunch]
) -> KernelCard:
    """The card of launches of one kernel.

    ``weight`` is how the names of weights begin that are read whole, ``table`` of those of which single rows are read,
    wherever these lie; ``few_rows`` are those of the launches that shall read weights once.
    """
    first = launches[0]
    compiled, assembled = first.compiled, first.assembled
    shared_bytes = max(launch.shared_bytes for launch in launches)
    occupied = occupancy(compiled.cc, first.kernel.threads, assembled.registers, shared_bytes)
    warps = occupied * MULTIPROCESSORS[compiled.cc].threads / WARP
    streams = [launch for launch in few_rows if launch.arrays(weight)]
    wavefronts = sum(launch.counters.shared_wavefronts for launch in launches)
    ideal_wavefronts = sum(launch.counters.shared_wavefronts_ideal for launch in launches)
    whole = [array for launch in launches for array in launch.arrays("") if not array.name.startswith(table)]
    sectors, ideal_sectors = _sectors(whole)
    return KernelCard(
        first.kernel.name,
        ".".join(map(str, compiled.cc)),
        first.kernel.threads,
        assembled.registers,
        assembled.spill_bytes,
        assembled.stack_bytes,
        shared_bytes,
        occupied,
        warps * max(launch.executed.bytes_in_flight for launch in launches),
        **ptx_counts(compiled),
        wide_weight_share=min((launch.wide_share(weight) for launch in streams), default=None),
        weight_reads=max((launch.reads(weight) for launch in streams), default=None),
        instructions_per_weight_byte=max((launch.instructions_per_byte(weight) for launch in streams), default=None),
        sectors=sectors,
        sector_efficiency=ideal_sectors / sectors if sectors else 1.0,
        bank_conflict_factor=wavefronts / ideal_wavefronts if ideal_wavefronts else 1.0,
    )


def _sectors(arrays: Sequence[ArrayCounters]) -> tuple[int, int]:
    """Asked for, and the fewest that would do."""
    kinds = [kind for array in arrays for kind in (array.load, array.store, array.atomic)]
    return sum(kind.sectors for kind in kinds), sum(kind.sectors_ideal for kind in kinds)


def ptx_counts(compiled: CompiledKernel) -> dict[str, int]:
    """What compiled PTX must hold none of."""
    patterns = {"f64": r"\.f64\b", "local": r"\.local\b", "calls": r"^\s*(?:@!?%p\d+\s+)?call\b"}
    return {name: len(re.findall(pattern, compiled.ptx, re.MULTILINE)) for name, pattern in patterns.items()}
