"""Backends to test, made once: they keep their threads and compiled kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.cpu.intrinsics import InstructionSet, host_instruction_set
from numba_engine.config import ActivationDtype, EngineConfig, KVCacheDtype

MakeBackend = Callable[..., CpuBackend]


@functools.cache
def _backend(
    activation_dtype: ActivationDtype, num_threads: int, kv_cache_dtype: KVCacheDtype, isa: InstructionSet | None
) -> CpuBackend:
    config = EngineConfig(num_threads=num_threads, activation_dtype=activation_dtype, kv_cache_dtype=kv_cache_dtype)
    return CpuBackend(config, isa=isa)


@pytest.fixture(scope="session")
def make_backend() -> MakeBackend:
    def make(
        activation_dtype: ActivationDtype = "int8",
        *,
        num_threads: int = 2,
        kv_cache_dtype: KVCacheDtype = "auto",
        isa: InstructionSet | None = None,
    ) -> CpuBackend:
        return _backend(activation_dtype, num_threads, kv_cache_dtype, isa)

    return make


@pytest.fixture(scope="session")
def backend(make_backend: MakeBackend) -> CpuBackend:
    return make_backend()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def instruction_sets() -> list[InstructionSet]:
    """Those this machine can run, the generic one always."""
    order: list[InstructionSet] = ["generic", "avx2", "avxvnni", "avx512vnni", "avx512bf16"]
    return order[: order.index(host_instruction_set()) + 1]
