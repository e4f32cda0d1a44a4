"""A simulated GPU at the driver's seam: memory, compiled kernels, launches. What runs is the kernels' PTX."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import numba_engine.backends.ptx.semantics  # noqa: F401  (registers the opcodes)
from numba_engine.backends.cuda.device import Grid, MemoryInfo
from numba_engine.backends.ptx import counters
from numba_engine.backends.ptx.binding import DTYPES, Checks, Counting, Pool
from numba_engine.backends.ptx.counters import ArrayCounters, LaunchCounters
from numba_engine.backends.ptx.errors import PtxError
from numba_engine.backends.ptx.machine import Machine
from numba_engine.backends.ptx.memory import GLOBAL_BASE, Allocation, Arena
from numba_engine.backends.ptx.parser import Module, parse
from numba_engine.backends.ptx.program import Program, build

if TYPE_CHECKING:
    from numba_engine.backends.cuda.compiler import Kernel

MAX_THREADS = 1024
STATIC_SHARED_LIMIT = 48 * 1024
SHARED_LIMIT = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024}
PARAM_BANK_BYTES = 4096
MULTIPROCESSORS = 132
"""What an H200 has: for launchers that ask how many blocks are resident."""
DEFAULT_LANES = 16384
"""Lanes of a batch: enough to amortise NumPy's call cost, few enough for registers to stay in cache."""


class PtxArray:
    """An array in simulated global memory."""

    __slots__ = ("_allocation", "_dtype", "_offset", "_shape")

    def __init__(self, allocation: Allocation, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int = 0) -> None:
        self._allocation = allocation
        self._shape = shape
        self._dtype = dtype
        self._offset = offset

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def size(self) -> int:
        return int(np.prod(self._shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self._dtype.itemsize

    @property
    def name(self) -> str:
        return self._allocation.name

    @property
    def allocation(self) -> Allocation:
        return self._allocation

    @property
    def pointer(self) -> int:
        """The simulated address of the first element."""
        return self._allocation.start + self._offset

    @property
    def strides(self) -> tuple[int, ...]:
        """In bytes, C order."""
        return tuple(
            int(np.prod(self._shape[axis + 1 :], dtype=np.int64)) * self._dtype.itemsize
            for axis in range(len(self._shape))
        )

    def reshape(self, *shape: int) -> PtxArray:
        count = int(np.prod(shape, dtype=np.int64))
        if count != self.size:
            raise ValueError(f"cannot reshape {self._shape} into {shape}")
        return PtxArray(self._allocation, shape, self._dtype, self._offset)

    def view(self, dtype: Any) -> PtxArray:
        """The same memory, in one dimension, as elements of another type."""
        kind = np.dtype(dtype)
        return PtxArray(self._allocation, (self.nbytes // kind.itemsize,), kind, self._offset)

    def __getitem__(self, rows: slice) -> PtxArray:
        """Consecutive rows, in the same memory."""
        start, stop, step = rows.indices(self._shape[0])
        assert step == 1, "rows must be consecutive"
        shape = (max(stop - start, 0), *self._shape[1:])
        return PtxArray(self._allocation, shape, self._dtype, self._offset + start * self.strides[0])


@dataclass(frozen=True, slots=True, eq=False)
class LoadedKernel:
    """A kernel of a module whose variables have their places in device memory."""

    module: Module
    program: Program
    symbols: dict[str, int]


@dataclass(slots=True, eq=False, weakref_slot=True)
class PtxGraph:
    """Launches to be executed, and the memory that they use.

    Replays are executed when the host wants something of the device, and no more of them than it wants: what is
    launched ahead costs nobody time.
    """

    queue: deque[Callable[[], None]]
    launches: list[Callable[[], None]] = field(default_factory=list)
    used: set[Allocation] = field(default_factory=set)
    spare: list[Allocation] = field(default_factory=list)
    """Given back while capturing: free for what is captured after."""

    @property
    def num_launches(self) -> int:
        return len(self.launches)

    def replay(self) -> None:
        self.queue.extend(self.launches)

    def take(self, nbytes: int) -> Allocation | None:
        for place, allocation in enumerate(self.spare):
            if allocation.nbytes == nbytes:
                return self.spare.pop(place)
        return None


class PtxDownload:
    """A copy that is made after what is queued before it."""

    def __init__(self, device: PtxDevice, array: PtxArray) -> None:
        self._device = device
        self._array = array
        self._host: np.ndarray | None = None

    def copy(self) -> None:
        self._host = self._device.contents(self._array).copy()

    def wait(self) -> np.ndarray:
        while self._host is None:
            self._device.run_next()
        return self._host


class PtxDevice:
    """A device that executes PTX in NumPy, checks every access and, on request, counts everything.

    Args:
        compute_capability: what kernels are compiled for.
        memory_bytes: size of global memory; the machine's own by default. Real memory is taken as it is touched.
        checks: what is looked for beyond bounds and alignment.
        counting: fill ``launches`` with the counters of each launch.
        lanes: threads executed at once.
    """

    def __init__(
        self,
        compute_capability: tuple[int, int] = (9, 0),
        *,
        memory_bytes: int | None = None,
        checks: Checks | None = None,
        counting: bool = False,
        lanes: int = DEFAULT_LANES,
    ) -> None:
        self.name = f"PTX executor, cc {compute_capability[0]}.{compute_capability[1]}"
        self.compute_capability = compute_capability
        self.multiprocessors = MULTIPROCESSORS
        self.checks = checks or Checks()
        self.lanes = lanes
        self.arena = Arena(memory_bytes, track_initialised=self.checks.uninitialised_global)
        self.launches: list[LaunchCounters] = []
        self._counting = self._counters = Counting.over(self.arena) if counting else None
        self._params = self.arena.allocate("kernel parameters", PARAM_BANK_BYTES, read_only=True)
        self._pool = Pool()
        self._loaded: dict[Any, LoadedKernel] = {}
        self._machines: dict[Any, Machine] = {}
        self._unnamed = itertools.count()
        self._queue: deque[Callable[[], None]] = deque()
        """Replayed launches and downloads that nobody has waited for yet."""
        self._capturing: PtxGraph | None = None
        self._captured: Counter[Allocation] = Counter()
        """In how many graphs an allocation is used."""
        self._unwanted: set[Allocation] = set()
        """Given back, but used in a graph."""

    # ---- memory ------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: Any, name: str = "") -> PtxArray:
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        allocation = self._capturing.take(nbytes) if self._capturing else None
        if allocation is None:
            allocation = self.arena.allocate(name or f"array {next(self._unnamed)}", nbytes)
        return PtxArray(allocation, tuple(shape), kind)

    def upload(self, host: np.ndarray, name: str = "") -> PtxArray:
        array = self.empty(host.shape, host.dtype, name)
        self.write(array, host)
        return array

    def write(self, array: PtxArray, host: np.ndarray) -> None:
        if host.shape != array.shape or host.dtype != array.dtype:
            raise ValueError(f"{host.dtype} {host.shape} written to {array.name}, {array.dtype} {array.shape}")
        self._not_while_capturing("write to an array")
        self._run_all()
        self.arena.write(array.allocation, host, array.pointer - array.allocation.start)

    def download(self, array: PtxArray) -> np.ndarray:
        return self.download_later(array).wait()

    def download_later(self, array: PtxArray) -> PtxDownload:
        self._not_while_capturing("download an array")
        download = PtxDownload(self, array)
        self._queue.append(download.copy)
        return download

    def contents(self, array: PtxArray) -> np.ndarray:
        """The array's memory, as a view."""
        start = array.pointer - array.allocation.start
        data = self.arena.contents(array.allocation)[start : start + array.nbytes]
        return data.view(array.dtype).reshape(array.shape)

    def free(self, array: PtxArray) -> None:
        if self._capturing is not None:
            self._capturing.spare.append(array.allocation)
        else:
            self._give_back(array.allocation)

    def synchronize(self) -> None:
        self._not_while_capturing("wait")
        self._run_all()

    def run_next(self) -> None:
        """Execute what is first in the queue."""
        self._queue.popleft()()

    def _run_all(self) -> None:
        while self._queue:
            self.run_next()

    def _not_while_capturing(self, what: str) -> None:
        if self._capturing is not None:
            raise RuntimeError(f"cannot {what} while capturing")

    def _give_back(self, allocation: Allocation) -> None:
        if allocation in self._captured:
            self._unwanted.add(allocation)
        else:
            self.arena.free(allocation)

    def memory_info(self) -> MemoryInfo:
        total = self.arena.capacity_bytes
        return MemoryInfo(total - self.arena.used_bytes, total)

    # ---- kernels -----------------------------------------------------------------------------------------------------

    def launch(
        self,
        kernel: Kernel,
        grid: Grid,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Compile the kernel, execute it. Raises PtxError for whatever the kernel does wrong."""
        _check_arguments(kernel, arguments)
        if kernel not in self._loaded:
            # The compiler is wanted only here: PTX that is at hand runs without numba-cuda.
            from numba_engine.backends.cuda.compiler import compile_kernel

            compiled = compile_kernel(kernel, self.compute_capability)
            self._loaded[kernel] = self.load(compiled.ptx, compiled.entry, kernel.name)
        run = partial(
            self.execute,
            *(self._loaded[kernel], grid, kernel.threads, tuple(arguments)),
            shared_bytes=shared_bytes,
            cooperative=cooperative,
        )
        if self._capturing is None:
            self._run_all()
            run()
        else:
            self._capturing.launches.append(run)
            self._capturing.used.update(a.allocation for a in arguments if isinstance(a, PtxArray))

    @contextmanager
    def capture(self) -> Iterator[PtxGraph]:
        assert self._capturing is None, "one capture at a time"
        self._capturing = graph = PtxGraph(self._queue)
        try:
            yield graph
        finally:
            self._capturing = None
            self._captured.update(graph.used)
            weakref.finalize(graph, self._forget_graph, graph.used).atexit = False
            for allocation in graph.spare:
                self._give_back(allocation)
            graph.spare.clear()

    def _forget_graph(self, used: Iterable[Allocation]) -> None:
        for allocation in used:
            self._captured[allocation] -= 1
            if not self._captured[allocation]:
                del self._captured[allocation]
                if allocation in self._unwanted:
                    self._unwanted.remove(allocation)
                    self.arena.free(allocation)

    def load(self, ptx: str, entry: str | None = None, name: str | None = None) -> LoadedKernel:
        """Parse a module and make one of its kernels (the only one by default) ready to run."""
        module = parse(ptx)
        if entry is None:
            if len(module.entries) != 1:
                names = [function.name for function in module.entries]
                raise PtxError("launch", f"the module has the kernels {names}; name one", kernel="?")
            entry = module.entries[0].name
        if entry not in module.functions:
            raise PtxError("launch", f"the module has no kernel {entry}", kernel=name or entry)
        symbols = {"%params": self._params.start}
        for variable in module.variables.values():
            if variable.space in ("global", "const") and not variable.is_extern:
                allocation = self.arena.allocate(variable.name, variable.nbytes, read_only=variable.space == "const")
                self.arena.write(allocation, np.frombuffer(variable.initial or bytes(variable.nbytes), np.uint8))
                symbols[variable.name] = allocation.start
        return LoadedKernel(module, build(module, module.functions[entry], name or entry), symbols)

    def execute(
        self,
        kernel: LoadedKernel,
        grid: Grid,
        block: Grid,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Run a loaded kernel with ``block`` threads a block."""
        grid_dim, block_dim = _three(grid), _three(block)
        program = kernel.program
        self._check_launch(program, grid_dim, block_dim, shared_bytes)
        params = pack_arguments(program, arguments)
        self.arena.write(self._params, params)
        self.arena.written.begin_launch()
        num_blocks = grid_dim[0] * grid_dim[1] * grid_dim[2]
        batch = num_blocks if cooperative else self._batch_blocks(num_blocks, block_dim)
        machine = self._machine(kernel, batch, block_dim, shared_bytes)
        counting = self._counting
        if counting is not None:
            counting.stats = np.zeros((len(self.arena.allocations), counters.NUM_FIELDS), np.int64)
            counting.shared[:] = 0
            machine.lanes_run[:] = 0
            machine.warps_run[:] = 0
        with np.errstate(all="ignore"):
            for first in self._batches(num_blocks, batch, program):
                machine.run(first, grid_dim, params)
        if counting is not None:
            self.launches.append(self._collect(machine, counting, grid_dim, block_dim, shared_bytes))

    def _batches(self, num_blocks: int, batch: int, program: Program) -> Iterable[int]:
        """First blocks of the batches to run: all, in order."""
        return range(0, num_blocks, batch)

    def _batch_blocks(self, num_blocks: int, block_dim: tuple[int, int, int]) -> int:
        threads = -(-block_dim[0] * block_dim[1] * block_dim[2] // 32) * 32
        most = max(1, self.lanes // threads)
        batches = -(-num_blocks // most)
        return -(-num_blocks // batches)

    def _machine(self, kernel: LoadedKernel, batch: int, block_dim: tuple[int, int, int], shared_bytes: int) -> Machine:
        key = (id(kernel.program), batch, block_dim, shared_bytes)
        if key not in self._machines:
            self._machines[key] = Machine(
                self.arena,
                kernel.module,
                kernel.program,
                kernel.symbols,
                batch,
                block_dim,
                shared_bytes,
                self.checks,
                self._counting,
                self._pool,
            )
        return self._machines[key]

    def _check_launch(
        self, program: Program, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
    ) -> None:
        threads = block[0] * block[1] * block[2]
        most = program.max_threads or MAX_THREADS
        if not 0 < threads <= most or min(block) < 1 or block[2] > 64:
            raise PtxError("launch", f"{block} threads a block; at most {most} are allowed", kernel=program.name)
        if min(grid) < 1 or grid[0] >= 2**31 or max(grid[1:]) > 65535:
            raise PtxError("launch", f"grid {grid}; allowed is 1 … (2^31 - 1, 65535, 65535)", kernel=program.name)
        if program.shared_bytes > STATIC_SHARED_LIMIT:
            raise PtxError(
                "launch",
                f"{program.shared_bytes} bytes of static shared memory; at most {STATIC_SHARED_LIMIT} are allowed",
                kernel=program.name,
            )
        limit = SHARED_LIMIT.get(self.compute_capability, STATIC_SHARED_LIMIT)
        if program.shared_bytes + shared_bytes > limit:
            raise PtxError(
                "launch",
                f"{program.shared_bytes} + {shared_bytes} bytes of shared memory; the device has {limit} a block",
                kernel=program.name,
            )

    # ---- counters ----------------------------------------------------------------------------------------------------

    def count(self, on: bool = True) -> None:
        """Fill ``launches`` from the next launch on, or no more."""
        self._run_all()
        if on != (self._counting is not None):
            self._machines.clear()  # they count as they were made to
        if on and self._counters is None:
            self._counters = Counting.over(self.arena)
        self._counting = self._counters if on else None
        self.forget_launches()

    def forget_launches(self) -> None:
        """Empty ``launches``: what they read and wrote counts as new again."""
        self._run_all()
        self.launches.clear()
        if self._counters is not None:
            self._counters.forget_seen()

    def _collect(
        self,
        machine: Machine,
        counting: Counting,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
    ) -> LaunchCounters:
        program = machine.program
        result = LaunchCounters(program.name, grid, block, program.shared_bytes + shared_bytes)
        by_class: dict[str, int] = {}
        for index, basic in enumerate(program.blocks):
            instructions = [*basic.instructions, *([basic.terminator] if basic.terminator else [])]
            result.lane_instructions += int(machine.lanes_run[index]) * len(instructions)
            result.warp_instructions += int(machine.warps_run[index]) * len(instructions)
            for instruction in instructions:
                kind = counters.instruction_class(instruction.parts)
                by_class[kind] = by_class.get(kind, 0) + int(machine.warps_run[index])
                result.warps_by_line[instruction.line] = int(machine.warps_run[index])
        result.warp_instructions_by_class = {kind: count for kind, count in by_class.items() if count}
        (
            result.shared_requests,
            result.shared_wavefronts,
            result.shared_wavefronts_ideal,
            result.shared_access_bytes,
        ) = (int(n) for n in counting.shared)
        for row, allocation in zip(counting.stats, self.arena.allocations, strict=True):
            if row.any():
                found = self._collect_array(row, allocation, counting)
                twins = sum(array.name == found.name for array in result.arrays.values())
                result.arrays[f"{found.name} #{twins + 1}" if twins else found.name] = found
        return result

    def _collect_array(self, row: np.ndarray, allocation: Allocation, counting: Counting) -> ArrayCounters:
        """Also clears the byte and sector marks for the next launch."""
        first = (allocation.start - GLOBAL_BASE) // counters.SECTOR_BYTES
        last = -(-(allocation.end - GLOBAL_BASE) // counters.SECTOR_BYTES)
        # Marks of sectors that were touched only: those of a large array that was hardly read take no memory.
        sectors = first + np.flatnonzero(counting.touched[first:last])
        reads_by_sector = counting.reads.reshape(-1, counters.SECTOR_BYTES)
        reads = reads_by_sector[sectors]
        written_by_sector = counting.written.reshape(-1, counters.SECTOR_BYTES)
        found = ArrayCounters(
            allocation.name,
            allocation.nbytes,
            counters.traffic(row, counters.LOAD),
            counters.traffic(row, counters.STORE),
            counters.traffic(row, counters.ATOMIC),
            distinct_bytes_read=int(np.count_nonzero(reads)),
            max_reads_per_byte=int(reads.max(initial=0)),
            distinct_sectors=len(sectors),
            address=allocation.start,
            first_bytes_read=counting.first(reads, counting.seen_reads, sectors),
            first_bytes_written=counting.first(written_by_sector[sectors], counting.seen_writes, sectors),
        )
        counting.seen_sectors.append(sectors)
        written_by_sector[sectors] = 0
        reads_by_sector[sectors] = 0
        counting.touched[sectors] = 0
        return found


def _three(extent: Grid) -> tuple[int, int, int]:
    given = (extent,) if isinstance(extent, int) else extent
    x, y, z = (*given, 1, 1)[:3]
    return int(x), int(y), int(z)


def _check_arguments(kernel: Kernel, arguments: Sequence[Any]) -> None:
    """Number, dtype and dimensions against the types the kernel was compiled for."""
    if len(arguments) != len(kernel.arguments):
        message = f"{len(arguments)} arguments, the kernel takes {len(kernel.arguments)}"
        raise PtxError("launch", message, kernel=kernel.name)
    for place, (argument, kind) in enumerate(zip(arguments, kernel.arguments, strict=True)):
        dimensions = getattr(kind, "ndim", None)
        if dimensions is None:
            wrong = "is an array, not a scalar" if isinstance(argument, PtxArray) else ""
        elif not isinstance(argument, PtxArray):
            wrong = "is no array of this device"
        elif len(argument.shape) != dimensions:
            wrong = f"has {len(argument.shape)} dimensions, not {dimensions}"
        elif argument.dtype.name != str(kind.dtype):
            wrong = f"is {argument.dtype.name}, not {kind.dtype}"
        else:
            wrong = ""
        if wrong:
            raise PtxError("launch", f"argument {place} {wrong}; it is declared {kind}", kernel=kernel.name)


def pack_arguments(program: Program, arguments: Sequence[Any]) -> np.ndarray:
    """The kernel's parameters as bytes. numba passes an array as 5 + 2 ndim of them: memory manager and owner (0 here),
    number and size of items, address, shape, strides in bytes."""
    flat: list[Any] = []
    for argument in arguments:
        if isinstance(argument, PtxArray):
            flat += [0, 0, argument.size, argument.dtype.itemsize, argument.pointer, *argument.shape, *argument.strides]
        else:
            flat.append(argument)
    if len(flat) != len(program.params):
        raise PtxError(
            "launch",
            f"{len(arguments)} arguments make {len(flat)} parameters, the kernel takes {len(program.params)}",
            kernel=program.name,
        )
    data = np.zeros(program.param_bytes, np.uint8)
    for value, (start, variable) in zip(flat, program.params.values(), strict=True):
        data[start : start + variable.nbytes] = _scalar_bytes(program, value, variable.element, variable.nbytes)
    return data


def _scalar_bytes(program: Program, value: Any, element: str, nbytes: int) -> np.ndarray:
    if isinstance(value, np.generic) and value.nbytes == nbytes:
        return np.frombuffer(value.tobytes(), np.uint8)
    if isinstance(value, float | np.floating):
        if element not in ("f32", "f64"):
            raise PtxError("launch", f"{value!r} passed for a parameter of type .{element}", kernel=program.name)
        return np.frombuffer(np.array(value, DTYPES[element]).tobytes(), np.uint8)
    if element in ("f32", "f64"):
        return np.frombuffer(np.array(float(value), DTYPES[element]).tobytes(), np.uint8)
    number = int(value)
    if not -(1 << (8 * nbytes - 1)) <= number < 1 << 8 * nbytes:
        raise PtxError("launch", f"{number} does not fit a parameter of {nbytes} bytes", kernel=program.name)
    return np.frombuffer((number & ((1 << 8 * nbytes) - 1)).to_bytes(nbytes, "little"), np.uint8)
