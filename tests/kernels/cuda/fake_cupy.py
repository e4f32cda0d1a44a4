"""The part of CuPy that ``CudaDevice`` uses, over the PTX executor: a fake GPU at the driver's seam.

Names and argument lists are those of CuPy 13 and 14. Images handed to ``moduleLoadData`` must be PTX.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from numba_engine.backends.ptx import PtxDevice
from numba_engine.backends.ptx.memory import GLOBAL_BASE


class OutOfMemoryError(MemoryError):
    pass


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    pass


class _Memory:
    def __init__(self, device: PtxDevice, nbytes: int) -> None:
        self._device, self._array = device, device.empty((nbytes,), np.uint8)
        self.ptr = self._array.pointer

    def __del__(self) -> None:
        self._device.free(self._array)


class _Graph:
    """Kernels captured with the parameters of their launches."""

    def __init__(self, kernels: list[Callable[[], None]]) -> None:
        self._kernels = kernels
        self.was_uploaded = False

    def upload(self, stream: _Stream) -> None:
        assert stream.captured is None
        self.was_uploaded = True

    def launch(self, stream: _Stream) -> None:
        assert stream.captured is None
        for kernel in self._kernels:
            kernel()


class _Stream:
    """Work is done at once, or captured; what waits or copies breaks a capture, as on a GPU."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
        self.captured: list[Callable[[], None]] | None = None

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

    def synchronize(self) -> None:
        self.refuse_capture()

    def begin_capture(self) -> None:
        assert self.captured is None
        self.captured = []

    def end_capture(self) -> _Graph:
        kernels, self.captured = self.captured, None
        assert kernels is not None
        return _Graph(kernels)

    def refuse_capture(self) -> None:
        if self.captured is not None:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported")


class _Event:
    def __init__(self, disable_timing: bool = False) -> None:
        assert disable_timing
        self._recorded = False

    def record(self, stream: _Stream) -> None:
        stream.refuse_capture()
        self._recorded = True

    def synchronize(self) -> None:
        assert self._recorded


def fake_cupy(device: PtxDevice, *, pool_bytes: int, driver_is_too_old: bool = False) -> dict[str, types.ModuleType]:
    """Modules for ``sys.modules``."""
    streams: dict[int, _Stream] = {}

    def make_stream(non_blocking: bool) -> _Stream:
        assert non_blocking
        stream = _Stream(ptr=42 + len(streams))
        streams[stream.ptr] = stream
        return stream

    def malloc(nbytes: int) -> _Memory:
        if nbytes > pool_bytes:
            raise OutOfMemoryError(f"out of memory allocating {nbytes:,} bytes")
        return _Memory(device, nbytes)

    def get_device_properties(index: int) -> dict[str, Any]:
        assert index == 0
        if driver_is_too_old:
            raise CUDARuntimeError("cudaErrorInsufficientDriver")
        major, minor = device.compute_capability
        return {"name": b"Fake GPU", "major": major, "minor": minor, "multiProcessorCount": 132}

    def memcpy_async(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        streams[stream].refuse_capture()
        to_device = kind == 1
        place = (target if to_device else source) - GLOBAL_BASE
        memory = device.arena.bytes[place : place + nbytes]
        host = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(source if to_device else target))
        if to_device:
            memory[:] = host
        else:
            host[:] = memory

    def module_load_data(image: bytes) -> str:
        if not image.lstrip().startswith(b"//"):
            raise CUDADriverError("CUDA_ERROR_INVALID_IMAGE")
        return image.decode()

    functions: dict[int, Any] = {}

    def module_get_function(module: str, name: str) -> int:
        functions[len(functions) + 1] = device.load(module, name)
        return len(functions)

    def launch_kernel(
        function: int,
        gx: int,
        gy: int,
        gz: int,
        bx: int,
        by: int,
        bz: int,
        shared: int,
        stream: int,
        params: int,
        extra: int,
    ) -> None:
        assert (by, bz, extra) == (1, 1, 0)
        loaded = functions[function]
        variables = [variable for _, variable in loaded.program.params.values()]
        addresses = (ctypes.c_uint64 * len(variables)).from_address(params)
        values = [
            np.frombuffer(ctypes.string_at(address, variable.nbytes), f"u{variable.nbytes}")[0]
            for address, variable in zip(addresses, variables, strict=True)
        ]
        kernel = partial(device.execute, loaded, (gx, gy, gz), bx, values, shared_bytes=shared)
        captured = streams[stream].captured
        if captured is None:
            kernel()
        else:
            captured.append(kernel)

    pool = types.SimpleNamespace(malloc=malloc, used_bytes=lambda: 1000, free_bytes=lambda: 200)
    runtime = types.ModuleType("cupy.cuda.runtime")
    vars(runtime).update(
        getDeviceProperties=get_device_properties,
        memcpyAsync=memcpy_async,
        memGetInfo=lambda: (pool_bytes, 2 * pool_bytes),
        setDevice=lambda index: None,
        CUDARuntimeError=CUDARuntimeError,
    )
    driver = types.ModuleType("cupy.cuda.driver")
    vars(driver).update(
        moduleLoadData=module_load_data,
        moduleGetFunction=module_get_function,
        launchKernel=launch_kernel,
        CUDADriverError=CUDADriverError,
    )
    memory = types.ModuleType("cupy.cuda.memory")
    vars(memory).update(OutOfMemoryError=OutOfMemoryError)
    cuda = types.ModuleType("cupy.cuda")
    vars(cuda).update(runtime=runtime, driver=driver, memory=memory)
    vars(cuda).update(Stream=make_stream, Event=_Event, MemoryPool=lambda: pool)
    vars(cuda).update(alloc_pinned_memory=lambda nbytes: (ctypes.c_uint8 * nbytes)())
    cupy = types.ModuleType("cupy")
    vars(cupy).update(cuda=cuda, __version__="0 (fake)")
    return {module.__name__: module for module in (cupy, cuda, runtime, driver, memory)}
