"""The CUDA backend on the executor, and (marked ``cuda``) on a real GPU; and what every test here needs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from numba_engine.backends.arrays import Array
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.ptx import PtxDevice
from numba_engine.config import EngineConfig, KVCacheDtype


@cache
def backend_on(device: str, kv_cache_dtype: KVCacheDtype = "float32") -> CudaBackend:
    """One of each for the whole session: they keep their compiled kernels."""
    config = EngineConfig(kv_cache_dtype=kv_cache_dtype)
    if device == "ptx":
        return CudaBackend(PtxDevice(), config, name="ptx")
    from numba_engine.backends.cuda.cuda_device import CudaDevice

    return CudaBackend(CudaDevice(), config, name="cuda")


@pytest.fixture(params=["ptx", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def backend(device: str) -> CudaBackend:
    return backend_on(device)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def filled(backend: CudaBackend, *shape: int) -> Array:
    """An output array full of NaN, so that what a kernel does not write shows."""
    return backend.upload(np.full(shape, np.nan, dtype=np.float32))


def nmse(out: np.ndarray, expected: np.ndarray) -> float:
    """Squared error over squared magnitude, in float64. NaN if any output was not written."""
    expected = expected.astype(np.float64)
    return float(((out - expected) ** 2).sum() / (expected**2).sum())
