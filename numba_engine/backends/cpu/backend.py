"""CpuBackend: the ops on NumPy arrays, by compiled kernels on a team of threads."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import psutil

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer, Weight
from numba_engine.backends.capture import CaptureBackend, Graph, Pending
from numba_engine.backends.cpu.commands import Command, CpuGraph
from numba_engine.backends.cpu.intrinsics import InstructionSet, host_instruction_set
from numba_engine.backends.cpu.kernels import advance
from numba_engine.backends.cpu.kernels.arithmetic_peak import (
    BUFFER_BYTES,
    MULTIPLY_ADDS,
    arithmetic_peak,
    arithmetic_peak_kernel,
)
from numba_engine.backends.cpu.kernels.quantize_rows import BF16, F32, INT8, prepared_bytes
from numba_engine.backends.cpu.kernels.read_bandwidth import read_bandwidth, read_bandwidth_kernel
from numba_engine.backends.cpu.limits import memory_left
from numba_engine.backends.cpu.thread_team import ThreadTeam, usable_cores
from numba_engine.backends.cpu.weights import CpuWeight, WeightMemory, allocate, load_weight, x_form
from numba_engine.backends.kernels import Kernels
from numba_engine.backends.ops import Op
from numba_engine.backends.sampling import Sampling
from numba_engine.config import EngineConfig
from numba_engine.formats import Format, StoredTensor

_BANDWIDTH_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A download that did not have to be waited for."""

    array: np.ndarray

    def wait(self) -> np.ndarray:
        return self.array


class CpuBackend(CaptureBackend):
    """One engine's CPU. Not thread-safe: one thread calls it at a time; several of them may live in one process."""

    name = "cpu"
    kv_cache_share = 0.25  # the rest of the machine wants memory too
    is_asynchronous = False
    rounds_sizes = False  # capturing is cheap, and attention reads how long contexts are when it runs

    def __init__(self, config: EngineConfig, *, isa: InstructionSet | None = None) -> None:
        """``isa`` overrides the choice of instruction set; every one gives the same numbers."""
        self._isa = isa or host_instruction_set()
        self.num_threads = config.num_threads or usable_cores()
        self.quantized_matmul_dtype = config.activation_dtype
        self._int8 = config.activation_dtype == "int8"
        self.activation_dtype = np.dtype(np.float32)
        kv_dtype = config.kv_cache_dtype
        if kv_dtype == "auto":
            kv_dtype = "float16" if self._int8 else "float32"
        self.kv_cache_dtype = np.dtype(kv_dtype)
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        self.device_name = f"{_cpu_model()}, {threads}, {self._isa}"
        self._team = ThreadTeam(self.num_threads)
        self._weight_memory = WeightMemory()
        self._prepared = np.empty(0, dtype=np.uint8)
        self._cache_words: dict[KVCacheLayer, tuple[np.ndarray, np.ndarray]] = {}
        self.partials = np.empty(1 << 18, dtype=np.float32)
        """Of attention, whose contexts are split where these suffice."""
        self._counts = np.empty(0, dtype=np.int32)
        self._graph: CpuGraph | None = None  # that is being captured
        self._kernels = Kernels("numba_engine.backends.cpu.kernels", fusion=config.fusion)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)

    def upload(self, host: np.ndarray) -> Array:
        return np.array(host, order="C")

    def download(self, array: Array) -> np.ndarray:
        return np.array(array)

    def load_weight(self, name: str, tensors: Sequence[StoredTensor]) -> Weight:
        return load_weight(
            name, tensors, self._weight_memory, int8_activations=self._int8, isa=self._isa, num_threads=self.num_threads
        )

    def write(self, array: Array, host: np.ndarray) -> None:
        np.copyto(cast(np.ndarray, array), host)

    def download_later(self, array: Array) -> Pending:
        return Downloaded(self.download(array))

    def synchronize(self) -> None:
        """Ops are done when they return."""

    def free_memory_bytes(self) -> int:
        available = int(psutil.virtual_memory().available)
        left = memory_left()
        return available if left is None else min(available, left)

    def read_bandwidth_gbps(self) -> float:
        """Best of the passes over 256 MiB that fit into 0.3 s: others' use of the memory only ever lowers it."""
        buffer = allocate(_BANDWIDTH_BYTES)
        buffer[:] = 1  # else all pages would be one page of zeros, in cache
        read_bandwidth(self.team, read_bandwidth_kernel(), buffer)
        best = 0.0
        end = time.perf_counter() + 0.3
        while (start := time.perf_counter()) < end:
            read_bandwidth(self.team, read_bandwidth_kernel(), buffer)
            best = max(best, buffer.nbytes / (time.perf_counter() - start) / 1e9)
        return best

    def peak_gflops(self, format: Format) -> tuple[float, str]:
        """Best of the passes that fit into 0.2 s. In two planes of int8, two of bytes make one of the model's."""
        buffer = allocate(BUFFER_BYTES)
        buffer[:] = 1
        form = x_form(format) if self._int8 else F32
        kernel = arithmetic_peak_kernel(form, self._isa)
        pieces = 256 * self.num_threads
        flops = 2 * pieces * MULTIPLY_ADDS[form] / (2 if form == INT8 else 1)
        arithmetic_peak(self.team, kernel, buffer, pieces)
        best = 0.0
        end = time.perf_counter() + 0.2
        while (start := time.perf_counter()) < end:
            arithmetic_peak(self.team, kernel, buffer, pieces)
            best = max(best, flops / (time.perf_counter() - start) / 1e9)
        names = {INT8: "int8 dot products, two planes", BF16: "bf16 dot products", F32: "float32 fma"}
        return best, f"{names[form]} ({self._isa})"

    # ---- running ops -----------------------------------------------------------------------------------------------

    def run(self, op: Op, args: tuple[Any, ...]) -> Any:
        return self._kernels.run(self, op, args)

    def fuses(self, op: Op) -> bool:
        return self._kernels.has(op)

    def advance(self, batch: Batch, sampling: Sampling, token_ids: Array, block_size: int) -> None:
        advance.launch(self, batch, sampling, token_ids, block_size)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        self._graph = CpuGraph(self._team.address)
        try:
            yield self._graph
        finally:
            self._graph = None

    # ---- what launches ask for -------------------------------------------------------------------------------------

    @property
    def team(self) -> np.ndarray:
        """State of the thread team that runs kernels."""
        return self._team.state

    def call(self, command: Command, *words: Any) -> None:
        """Call a command, or note the call where a graph is captured."""
        if self._graph is not None:
            self._graph.note(command, words)
        else:
            command.call(self._team.address, *words)

    def segment_table(self, weight: Weight) -> np.ndarray:
        """One row a segment (kernels/linear.py)."""
        assert isinstance(weight, CpuWeight)
        return weight.table

    def cache_words(self, cache: KVCacheLayer) -> tuple[np.ndarray, np.ndarray]:
        """k and v as numba accepts them: it knows no float16 arrays on CPUs, and commands only want the address."""
        words = self._cache_words.get(cache)
        if words is None:
            words = self._cache_words[cache] = _words(cache.k), _words(cache.v)
        return words

    def prepared(self, rows: int, in_features: int) -> np.ndarray:
        """Memory for x [rows, in_features] in the forms that weights take, aligned to 64 bytes."""
        wanted = prepared_bytes(rows, in_features)
        if self._prepared.size < wanted:
            memory = np.empty(wanted + 63, dtype=np.uint8)
            self._prepared = memory[-memory.ctypes.data % 64 :]
        return self._prepared

    def zero_counts(self, size: int) -> np.ndarray:
        """So many int32 zeros, or more. The kernel leaves them zero."""
        if self._counts.size < size:
            self._counts = np.zeros(size, dtype=np.int32)
        return self._counts


def _words(array: Array) -> np.ndarray:
    host = cast(np.ndarray, array)
    return host.view(np.uint16) if host.itemsize == 2 else host


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
