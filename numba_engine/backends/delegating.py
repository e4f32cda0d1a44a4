"""DelegatingBackend: a backend that stands in another one's place and decides what becomes of each call of an op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numba_engine.backends.arrays import Array, Weight
from numba_engine.backends.base import Backend
from numba_engine.backends.ops import Op
from numba_engine.formats import Format, StoredTensor


class DelegatingBackend(Backend):
    """Memory is the inner backend's; ops come to ``run``, which a subclass overrides."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.name = inner.name
        self.device_name = inner.device_name
        self.num_threads = inner.num_threads
        self.activation_dtype = inner.activation_dtype
        self.kv_cache_dtype = inner.kv_cache_dtype
        self.quantized_matmul_dtype = inner.quantized_matmul_dtype
        self.kv_cache_share = inner.kv_cache_share

    def run(self, op: Op, args: tuple[Any, ...]) -> Any:
        return getattr(self.inner, op.name)(*args)

    def fuses(self, op: Op) -> bool:
        return self.inner.fuses(op)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self.inner.empty(shape, dtype)

    def upload(self, host: np.ndarray) -> Array:
        return self.inner.upload(host)

    def download(self, array: Array) -> np.ndarray:
        return self.inner.download(array)

    def load_weight(self, name: str, tensors: Sequence[StoredTensor]) -> Weight:
        return self.inner.load_weight(name, tensors)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def free_memory_bytes(self) -> int:
        return self.inner.free_memory_bytes()

    def read_bandwidth_gbps(self) -> float:
        return self.inner.read_bandwidth_gbps()

    def peak_gflops(self, format: Format) -> tuple[float, str] | None:
        return self.inner.peak_gflops(format)


class UnfusedBackend(DelegatingBackend):
    """Every fused op is composed of its unfused ones, so that each of them shows."""

    def run(self, op: Op, args: tuple[Any, ...]) -> Any:
        return op.compose(self, *args) if op.is_fused else super().run(op, args)

    def fuses(self, op: Op) -> bool:
        return False
