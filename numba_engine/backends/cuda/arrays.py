"""Arrays of the CUDA backend: device memory that gives itself back."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np

from numba_engine.backends.arrays import Array
from numba_engine.backends.cuda.device import Device, DeviceArray


class _Memory:
    """Owns an allocation; freed with the last array that views it, unless the process is ending."""

    __slots__ = ("__weakref__",)

    def __init__(self, device: Device, array: DeviceArray) -> None:
        weakref.finalize(self, device.free, array).atexit = False


class CudaArray:
    """An ``Array`` on a device; slices share its memory."""

    __slots__ = ("__weakref__", "_memory", "on_device")

    def __init__(self, memory: _Memory, on_device: DeviceArray) -> None:
        self._memory = memory
        self.on_device = on_device

    @classmethod
    def owning(cls, device: Device, on_device: DeviceArray) -> CudaArray:
        return cls(_Memory(device, on_device), on_device)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.on_device.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.on_device.dtype

    @property
    def nbytes(self) -> int:
        return self.on_device.nbytes

    def __getitem__(self, rows: slice, /) -> CudaArray:
        return CudaArray(self._memory, self.on_device[rows])

    def viewed(self, dtype: Any) -> CudaArray:
        """The same memory, in one dimension, as elements of another type."""
        return CudaArray(self._memory, self.on_device.view(dtype))


def on_device(array: Array) -> DeviceArray:
    """The device's own array of one of its backend."""
    assert isinstance(array, CudaArray)
    return array.on_device


def flat(array: CudaArray) -> DeviceArray:
    """The device's own array, in one dimension, as kernels take it."""
    if len(array.shape) == 1:
        return array.on_device
    return array.on_device.reshape(math.prod(array.shape))


def viewed(array: Array, dtype: Any) -> CudaArray:
    """``CudaArray.viewed`` of a backend's array."""
    assert isinstance(array, CudaArray)
    return array.viewed(dtype)
