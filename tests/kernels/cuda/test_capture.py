"""Capturing and replaying launches: on the executor, and as a CUDA graph over the fake driver and on a real one."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from numba_engine.backends.cuda import cuda_device
from numba_engine.backends.cuda.cuda_device import CudaDevice
from numba_engine.backends.cuda.device import Device, DeviceArray
from numba_engine.backends.cuda.kernels.gather_rows import gather_rows_kernel
from numba_engine.backends.ptx import PtxDevice
from tests.kernels.cuda.fake_cupy import fake_cupy

SHAPE = (3, 5)
ORDER = np.array([2, 0, 1], np.int32)

UsedBytes = Callable[[], int]


@pytest.fixture(params=["ptx", "fake", pytest.param("cuda", marks=pytest.mark.cuda)])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def simulated() -> PtxDevice:
    return PtxDevice((9, 0), memory_bytes=1 << 24)


@pytest.fixture
def device(kind: str, simulated: PtxDevice, monkeypatch: pytest.MonkeyPatch) -> Device:
    if kind == "ptx":
        return simulated
    if kind == "fake":
        for name, module in fake_cupy(simulated, pool_bytes=1 << 22).items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(cuda_device, "find_ptxas", lambda: None)
    return CudaDevice()


def gather_rows(device: Device, out: DeviceArray, x: DeviceArray, order: DeviceArray) -> None:
    """A launch: out = x[order]."""
    (num_rows, size), flat = SHAPE, [array.reshape(array.nbytes // 4) for array in (out, x)]
    device.launch(gather_rows_kernel(), (num_rows, 1), [*flat, order, size])


def rows(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(SHAPE, dtype=np.float32)


def test_a_replay_does_with_the_arrays_what_the_launches_would(device: Device, rng: np.random.Generator) -> None:
    first, second, third = rows(rng), rows(rng), rows(rng)
    x, order = device.upload(first), device.upload(ORDER)
    middle, out = device.upload(np.zeros(SHAPE, np.float32)), device.upload(np.zeros(SHAPE, np.float32))
    with device.capture() as graph:
        gather_rows(device, middle, x, order)
        gather_rows(device, out, middle, order)
    assert graph.num_launches == 2
    assert not device.download(out).any(), "nothing ran yet"
    for host in (first, second, third):
        device.write(x, host)
        graph.replay()
        np.testing.assert_array_equal(device.download(out), host[ORDER][ORDER])
    device.write(order, np.arange(3, dtype=np.int32))
    graph.replay()
    np.testing.assert_array_equal(device.download(out), third)


def test_a_replay_runs_when_its_result_is_waited_for(simulated: PtxDevice, rng: np.random.Generator) -> None:
    """On the executor, where a step takes seconds: one launched ahead does not hold up the one before it."""
    simulated.count()
    x, order = simulated.upload(rows(rng)), simulated.upload(ORDER)
    out = simulated.upload(np.zeros(SHAPE, np.float32))
    with simulated.capture() as graph:
        gather_rows(simulated, out, x, order)
    graph.replay()
    first = simulated.download_later(out)
    graph.replay()
    second = simulated.download_later(out)
    assert len(simulated.launches) == 0
    first.wait()
    assert len(simulated.launches) == 1
    second.wait()
    assert len(simulated.launches) == 2
    graph.replay()
    gather_rows(simulated, out, x, order)
    assert len(simulated.launches) == 4, "a launch runs at once, after what was launched before it"


def test_memory_of_a_recording_is_its_own_while_it_lives(device: Device, rng: np.random.Generator) -> None:
    x, order, out = device.upload(rows(rng)), device.upload(ORDER), device.upload(np.zeros(SHAPE, np.float32))
    with device.capture() as graph:
        middle = device.empty(SHAPE, np.float32)
        gather_rows(device, middle, x, order)
        gather_rows(device, out, middle, order)
        device.free(middle)
    host = device.download(x)
    device.free(x)
    others = [device.upload(np.full(SHAPE, i, np.float32)) for i in range(6)]
    graph.replay()
    np.testing.assert_array_equal(device.download(out), host[ORDER][ORDER])
    for i, other in enumerate(others):
        assert (device.download(other) == i).all()


def test_what_is_given_back_while_capturing_serves_again(device: Device, rng: np.random.Generator) -> None:
    x, order, out = device.upload(rows(rng)), device.upload(ORDER), device.upload(np.zeros(SHAPE, np.float32))
    with device.capture() as graph:
        source, places = x, set()
        for _ in range(5):
            passing = device.empty(SHAPE, np.float32)
            gather_rows(device, passing, source, order)
            if source is not x:
                device.free(source)
            places.add(passing.pointer)  # type: ignore[attr-defined]
            source = passing
        gather_rows(device, out, source, order)
    assert len(places) == 2
    graph.replay()
    expected = device.download(x)
    for _ in range(6):
        expected = expected[ORDER]
    np.testing.assert_array_equal(device.download(out), expected)


def test_memory_comes_back_with_the_end_of_the_graphs(
    kind: str, device: Device, simulated: PtxDevice, rng: np.random.Generator
) -> None:
    if kind == "cuda":
        pytest.skip("a pool keeps memory to itself")
    order, out = device.upload(ORDER), device.upload(np.zeros(SHAPE, np.float32))
    gather_rows(device, out, device.upload(rows(rng)), order)  # loads the kernel
    before = simulated.arena.used_bytes
    x = device.upload(rows(rng))
    graphs = []
    for _ in range(2):
        with device.capture() as graph:
            passing = device.empty(SHAPE, np.float32)
            gather_rows(device, passing, x, order)
            gather_rows(device, out, passing, order)
            device.free(passing)
        graphs.append(graph)
    device.free(x)
    array_bytes = 4 * SHAPE[0] * SHAPE[1]
    assert simulated.arena.used_bytes - before == 3 * array_bytes
    del graph, graphs[0], passing
    assert simulated.arena.used_bytes - before == 2 * array_bytes
    del graphs[0], x
    assert simulated.arena.used_bytes == before


def test_copies_and_waiting_are_refused_while_capturing(device: Device, rng: np.random.Generator) -> None:
    x, order = device.upload(rows(rng)), device.upload(ORDER)
    forbidden: list[Callable[[], object]] = [
        lambda: device.upload(ORDER),
        lambda: device.write(order, ORDER),
        lambda: device.download(x),
        lambda: device.download_later(x),
        device.synchronize,
    ]
    for call in forbidden:
        with pytest.raises(RuntimeError, match=r"cannot .* while capturing"), device.capture():
            call()
        np.testing.assert_array_equal(device.download(order), ORDER)  # and all is as before


def test_a_download_has_what_was_there_when_it_was_asked_for(device: Device, rng: np.random.Generator) -> None:
    before, after = rows(rng), rows(rng)
    x = device.upload(before)
    early = device.download_later(x[1:])
    device.write(x, after)
    late = device.download_later(x)
    np.testing.assert_array_equal(late.wait(), after)
    np.testing.assert_array_equal(early.wait(), before[1:])
