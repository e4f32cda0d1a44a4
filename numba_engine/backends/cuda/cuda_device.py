"""CudaDevice: a real GPU. CuPy's memory pool, streams and driver calls run the kernels numba compiled.

Launches go through CuPy's driver calls with the parameters packed here, because numba's own dispatcher takes 6.6 µs and
3.7 more per array, and 87 with CuPy arrays.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_engine.backends.cuda.compiler import Kernel, compile_kernel
from numba_engine.backends.cuda.device import Grid, MemoryInfo
from numba_engine.backends.cuda.ptxas import assemble, find_ptxas
from numba_engine.errors import BackendUnavailableError, OutOfMemoryError

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_SLOTS_PER_ARRAY = 7  # numba's ABI: memory manager, owner, items, item size, address, shape, stride
_STATIC_SHARED_LIMIT = 48 * 1024


class GpuArray:
    """C-contiguous device memory, kept alive by ``owner``."""

    __slots__ = ("dtype", "owner", "pointer", "shape")

    def __init__(self, owner: Any, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.owner = owner
        self.pointer = pointer
        self.shape = shape
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def reshape(self, *shape: int) -> GpuArray:
        assert math.prod(shape) == math.prod(self.shape), f"{self.shape} is not {shape}"
        return GpuArray(self.owner, self.pointer, shape, self.dtype)

    def view(self, dtype: Any) -> GpuArray:
        kind = np.dtype(dtype)
        return GpuArray(self.owner, self.pointer, (self.nbytes // kind.itemsize,), kind)

    def __getitem__(self, rows: slice, /) -> GpuArray:
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1, "rows must be consecutive"
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(stop - start, 0), *self.shape[1:])
        return GpuArray(self.owner, self.pointer + start * row_bytes, shape, self.dtype)


class CudaGraph:
    """A CUDA graph, and the memory that its kernels use."""

    def __init__(self, stream: Any) -> None:
        self.num_launches = 0
        self._stream = stream
        self._graph: Any = None
        self._used: dict[int, Any] = {}  # by address
        self._spare: dict[int, list[Any]] = {}  # given back while capturing, by size in bytes

    def replay(self) -> None:
        self._graph.launch(self._stream)

    def finish(self, graph: Any) -> None:
        self._graph = graph
        self._spare.clear()
        graph.upload(self._stream)  # else the first launch does it

    def note_launch(self, arguments: Sequence[Any]) -> None:
        self.num_launches += 1
        self._used.update((a.owner.ptr, a.owner) for a in arguments if isinstance(a, GpuArray))

    def give_back(self, array: GpuArray) -> None:
        self._spare.setdefault(array.nbytes, []).append(array.owner)

    def take(self, nbytes: int) -> Any | None:
        """Memory that what was captured so far is done with."""
        spare = self._spare.get(nbytes)
        return spare.pop() if spare else None


class CudaDownload:
    """A copy into page-locked host memory, and the event that follows it."""

    def __init__(self, host: np.ndarray, event: Any) -> None:
        self._host = host
        self._event = event

    def wait(self) -> np.ndarray:
        self._event.synchronize()
        return self._host


@dataclass(slots=True, eq=False)
class _LoadedKernel:
    """A function of the driver, and a buffer of 8-byte parameter slots with the table of their addresses."""

    function: int
    slots: np.ndarray
    addresses: np.ndarray
    shared_bytes_allowed: int


class CudaDevice:
    """GPU 0 (of CUDA_VISIBLE_DEVICES) and one stream.

    Raises:
        BackendUnavailableError: if CuPy does not work with this driver.
    """

    def __init__(self) -> None:
        import cupy
        from cupy.cuda import driver, runtime

        self._cuda, self._runtime, self._driver = cupy.cuda, runtime, driver
        self._out_of_memory = cupy.cuda.memory.OutOfMemoryError
        try:
            properties = runtime.getDeviceProperties(0)
            self.stream = cupy.cuda.Stream(non_blocking=True)
        except runtime.CUDARuntimeError as error:
            raise BackendUnavailableError(
                f"CuPy {cupy.__version__} does not work with this driver: {error}."
                " Install the extra that matches the driver's CUDA version, numba-engine[cuda12] or [cuda13]."
            ) from error
        self.name = properties["name"].decode()
        self.compute_capability = (int(properties["major"]), int(properties["minor"]))
        self.multiprocessors = int(properties["multiProcessorCount"])
        self.num_launches = 0
        """Single launches so far, not those of graphs."""
        self._pool = cupy.cuda.MemoryPool()
        self._loaded: dict[Kernel, _LoadedKernel] = {}
        self._capturing: CudaGraph | None = None
        self._threads = {threading.get_ident()}

    # ---- memory ------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: Any, name: str = "") -> GpuArray:
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        self._attach_thread()
        try:
            memory = None if self._capturing is None else self._capturing.take(nbytes)
            if memory is None:
                with self.stream:  # the pool hands memory out again in this stream's order
                    memory = self._pool.malloc(max(nbytes, 1))
        except self._out_of_memory as error:
            info = self.memory_info()
            raise OutOfMemoryError(
                f"{name or 'an array'} needs {nbytes:,} bytes of GPU memory; {info.free_bytes:,} of"
                f" {info.total_bytes:,} are free and this process holds {self._pool.used_bytes():,}."
                " Use a smaller or quantised model, or lower kv_cache_bytes or num_kv_blocks."
            ) from error
        return GpuArray(memory, memory.ptr, tuple(shape), kind)

    def upload(self, host: np.ndarray, name: str = "") -> GpuArray:
        array = self.empty(host.shape, host.dtype, name)
        self.write(array, host)
        return array

    def write(self, array: GpuArray, host: np.ndarray) -> None:
        assert host.shape == array.shape
        assert host.dtype == array.dtype
        self._not_while_capturing("write to an array")
        source = np.ascontiguousarray(host)
        if array.nbytes:  # pageable memory is staged before the call returns, so the host array is free again
            self._runtime.memcpyAsync(array.pointer, source.ctypes.data, array.nbytes, _HOST_TO_DEVICE, self.stream.ptr)

    def download(self, array: GpuArray) -> np.ndarray:
        self._not_while_capturing("download an array")
        host = np.empty(array.shape, array.dtype)
        if array.nbytes:
            self._runtime.memcpyAsync(host.ctypes.data, array.pointer, array.nbytes, _DEVICE_TO_HOST, self.stream.ptr)
        self.stream.synchronize()
        return host

    def download_later(self, array: GpuArray) -> CudaDownload:
        self._not_while_capturing("download an array")
        self._attach_thread()
        # Dropped before it arrived, the host's memory goes back to its pool; later copies come later in the stream.
        memory = self._cuda.alloc_pinned_memory(max(array.nbytes, 1))
        host = np.frombuffer(memory, array.dtype, math.prod(array.shape)).reshape(array.shape)
        event = self._cuda.Event(disable_timing=True)
        if array.nbytes:
            self._runtime.memcpyAsync(host.ctypes.data, array.pointer, array.nbytes, _DEVICE_TO_HOST, self.stream.ptr)
        event.record(self.stream)
        return CudaDownload(host, event)

    def free(self, array: GpuArray) -> None:
        """Back to the pool, which hands it out again in the stream's order."""
        if self._capturing is not None:
            self._capturing.give_back(array)
        array.owner = None

    def memory_info(self) -> MemoryInfo:
        free, total = self._runtime.memGetInfo()
        return MemoryInfo(free + self._pool.free_bytes(), total)

    def synchronize(self) -> None:
        self._not_while_capturing("wait")
        self.stream.synchronize()

    def _not_while_capturing(self, what: str) -> None:
        if self._capturing is not None:
            raise RuntimeError(f"cannot {what} while capturing")

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
        self._attach_thread()
        if self._capturing is not None:
            self._capturing.note_launch(arguments)
        else:
            self.num_launches += 1
        loaded = self._loaded.get(kernel) or self._load(kernel)
        _fill(loaded.slots, kernel, arguments)
        if shared_bytes > loaded.shared_bytes_allowed:
            attribute = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._driver.funcSetAttribute(loaded.function, attribute, shared_bytes)
            loaded.shared_bytes_allowed = shared_bytes
        x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
        parameters = loaded.addresses.ctypes.data
        if cooperative:
            self._driver.launchCooperativeKernel(
                loaded.function, x, y, z, kernel.threads, 1, 1, shared_bytes, self.stream.ptr, parameters
            )
        else:
            self._driver.launchKernel(
                loaded.function, x, y, z, kernel.threads, 1, 1, shared_bytes, self.stream.ptr, parameters, 0
            )

    @contextmanager
    def capture(self) -> Iterator[CudaGraph]:
        assert self._capturing is None, "one capture at a time"
        self._attach_thread()
        self._capturing = graph = CudaGraph(self.stream)
        self.stream.begin_capture()  # in CuPy's relaxed mode, which lets the pool ask the driver for memory
        try:
            yield graph
        except BaseException:
            with suppress(self._runtime.CUDARuntimeError):  # the capture may be what failed
                self.stream.end_capture()
            raise
        else:
            graph.finish(self.stream.end_capture())
        finally:
            self._capturing = None

    def _load(self, kernel: Kernel) -> _LoadedKernel:
        """Machine code from ptxas where there is one: the PTX may be newer than what the driver can parse."""
        compiled = compile_kernel(kernel, self.compute_capability)
        image = assemble(compiled).cubin if find_ptxas() else compiled.ptx.encode()
        try:
            function = self._driver.moduleGetFunction(self._driver.moduleLoadData(image), compiled.entry)
        except self._driver.CUDADriverError as error:
            raise BackendUnavailableError(
                f"the driver does not load kernel {kernel.name}: {error}. If it calls the PTX version unsupported,"
                " update the driver or pip install nvidia-cuda-nvcc."
            ) from error
        num_slots = sum(_SLOTS_PER_ARRAY if hasattr(kind, "ndim") else 1 for kind in kernel.arguments)
        slots = np.zeros(num_slots, np.uint64)
        addresses = slots.ctypes.data + 8 * np.arange(num_slots, dtype=np.uint64)
        self._loaded[kernel] = _LoadedKernel(function, slots, addresses, _STATIC_SHARED_LIMIT)
        return self._loaded[kernel]

    def _attach_thread(self) -> None:
        """The device's context belongs to a thread once it has asked for it."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._runtime.setDevice(0)
            self._threads.add(thread)


def _fill(slots: np.ndarray, kernel: Kernel, arguments: Sequence[Any]) -> None:
    """Parameters into their slots; the driver reads as many bytes of each as its type has."""
    assert len(arguments) == len(kernel.arguments), f"{kernel.name} takes {len(kernel.arguments)} arguments"
    place = 0
    for argument, kind in zip(arguments, kernel.arguments, strict=True):
        if isinstance(argument, GpuArray):
            (size,) = argument.shape
            itemsize = argument.dtype.itemsize
            slots[place : place + _SLOTS_PER_ARRAY] = (0, 0, size, itemsize, argument.pointer, size, itemsize)
            place += _SLOTS_PER_ARRAY
        else:
            slots[place : place + 1].view(str(kind))[0] = argument
            place += 1
