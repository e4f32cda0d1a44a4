"""What the benches do on a GPU only (copies, clearing, events, recordings), over the fake driver of the CUDA tests."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from numba_engine.backends.cuda import cuda_device
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.cuda.cuda_device import CudaDevice
from numba_engine.backends.ptx import PtxDevice
from numba_engine.backends.ptx.memory import GLOBAL_BASE
from numba_engine.config import EngineConfig
from numba_engine.formats import BF16, Q8_0
from perf.bench_decode import Workload, step_seconds
from perf.gpu_time import plain_read_gbps
from perf.random_model import CONFIGS, clear, copied_weight, random_model, random_weight
from tests.kernels.cuda.fake_cupy import fake_cupy

TINY = replace(CONFIGS["tiny"], vocab_size=256, layers=CONFIGS["tiny"].layers[:1])


class TimingEvent:
    def __init__(self, disable_timing: bool = False) -> None:
        self.time_s = 0.0

    def record(self, stream: object) -> None:
        self.time_s = time.perf_counter()

    def synchronize(self) -> None: ...


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    device = PtxDevice((9, 0), memory_bytes=1 << 28)
    modules = fake_cupy(device, pool_bytes=1 << 27)
    runtime, cuda = modules["cupy.cuda.runtime"], modules["cupy.cuda"]
    memory, copy = device.arena.bytes, runtime.memcpyAsync

    def memcpy_async(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        if kind == runtime.memcpyDeviceToDevice:
            memory[target - GLOBAL_BASE :][:nbytes] = memory[source - GLOBAL_BASE :][:nbytes]
        else:
            copy(target, source, nbytes, kind, stream)

    def memset_async(target: int, value: int, nbytes: int, stream: int) -> None:
        memory[target - GLOBAL_BASE :][:nbytes] = value

    vars(runtime).update(memcpyAsync=memcpy_async, memsetAsync=memset_async, memcpyDeviceToDevice=3)
    elapsed_ms = lambda first, last: 1e3 * (last.time_s - first.time_s)  # noqa: E731
    vars(cuda).update(Event=TimingEvent, get_elapsed_time=elapsed_ms)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cuda_device, "find_ptxas", lambda: None)
    return CudaBackend(CudaDevice(), EngineConfig(kv_cache_dtype="float16"), name="cuda")


@pytest.mark.kernels
def test_weights_are_copied_and_memory_is_cleared_on_the_device(backend: CudaBackend) -> None:
    weight = random_weight(backend, np.random.default_rng(3), Q8_0, 40, 128)
    data, copy = (each.segments[0].data for each in (weight, copied_weight(backend, weight)))
    assert copy.on_device.pointer != data.on_device.pointer
    np.testing.assert_array_equal(backend.download(copy), backend.download(data))
    clear(backend, copy)
    assert not backend.download(copy).any()
    assert backend.download(data).any()


@pytest.mark.kernels
def test_a_plain_read_is_recorded_and_timed_by_events(backend: CudaBackend) -> None:
    assert 0 < plain_read_gbps(backend, 1 << 20) < 1000


@pytest.mark.kernels
@pytest.mark.parametrize("graph", [True, False])
def test_steps_are_timed_recorded_and_not(backend: CudaBackend, graph: bool) -> None:
    weights = random_model(backend, TINY, BF16)
    assert step_seconds(backend, TINY, weights, Workload(1, 18, 1), fusion=True, graph=graph) > 0
