"""Kernels compiled by numba.cuda give what NumPy gives."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
pytest.importorskip("cuda.bindings", reason="the CUDA compiler libraries are not installed")

from numba.cuda.types import float32, int32, uint32

from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.ptx import Checks, PtxDevice, PtxError
from tests.ptx import kernels
from tests.ptx.kernels import f32_1d, i32_1d, load, u32_1d

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("n", [1, 127, 128, 5000])
@pytest.mark.parametrize("lanes", [128, 1000, 16384])
def test_block_reduction(n: int, lanes: int) -> None:
    """The same bits however many blocks run at once."""
    device = PtxDevice(memory_bytes=1 << 24, lanes=lanes)
    x = RNG.standard_normal(n).astype(np.float32)
    out = device.empty((9,), np.float32)
    device.execute(load(device, kernels.block_sum, [f32_1d, f32_1d, int32]), 9, 128, [out, device.upload(x), n])
    padded = np.zeros(-(-n // (9 * 128)) * 9 * 128, np.float32)
    padded[:n] = x
    partial = np.zeros((9, 128), np.float32)
    for share in padded.reshape(-1, 9, 128):
        partial += share
    while partial.shape[1] > 1:
        half = partial.shape[1] // 2
        partial = partial[:, :half] + partial[:, half:]
    assert (device.download(out) == partial[:, 0]).all()


def test_gemv_with_128_bit_loads(device: PtxDevice) -> None:
    rows, columns = 36, 1000
    w = RNG.standard_normal((rows, columns)).astype(np.float32)
    bits = (w.view(np.uint32) >> 16).astype(np.uint16)
    x = RNG.standard_normal(columns).astype(np.float32)
    y = device.empty((rows,), np.float32)
    kernel = load(device, kernels.gemv_bf16, [f32_1d, u32_1d, f32_1d, uint32])
    weights = device.upload(np.ascontiguousarray(bits).view(np.uint32).reshape(-1))
    device.execute(kernel, rows // 4, (32, 4), [y, weights, device.upload(x), columns])
    exact = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64) @ x.astype(np.float64)
    np.testing.assert_allclose(device.download(y), exact, rtol=0, atol=2e-4)


def test_divergent_loops(device: PtxDevice) -> None:
    start = np.arange(1, 701, dtype=np.uint32)
    steps = device.upload(np.zeros(700, np.int32))
    device.execute(load(device, kernels.collatz, [i32_1d, u32_1d]), 6, 128, [steps, device.upload(start)])

    def length(n: int) -> int:
        count = 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            count += 1
        return count

    assert device.download(steps).tolist() == [length(n) for n in start.tolist()]


def test_histogram_by_atomics(device: PtxDevice) -> None:
    values = RNG.integers(0, 16, 3001).astype(np.int32)
    counts = device.upload(np.zeros(16, np.int32))
    device.execute(load(device, kernels.histogram, [i32_1d, i32_1d]), 5, 96, [counts, device.upload(values)])
    assert (device.download(counts) == np.bincount(values, minlength=16)).all()


def test_transpose_in_tiles(device: PtxDevice) -> None:
    x = RNG.standard_normal((77, 130)).astype(np.float32)
    out = device.upload(np.zeros((130, 77), np.float32))
    kernel = load(device, kernels.transpose, [float32[:, ::1]] * 2)
    device.execute(kernel, (5, 3), (32, 8), [out, device.upload(x)])
    assert (device.download(out) == x.T).all()


def test_softmax_by_shuffles(device: PtxDevice) -> None:
    x = (RNG.standard_normal((7, 100)) * 4).astype(np.float32)
    out = device.upload(np.zeros_like(x))
    device.execute(load(device, kernels.softmax_rows, [float32[:, ::1]] * 2), 7, 32, [out, device.upload(x)])
    exact = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(device.download(out), exact / exact.sum(axis=1, keepdims=True), rtol=3e-6)


def test_library_functions(device: PtxDevice) -> None:
    x = (RNG.standard_normal(300) * 3).astype(np.float32)
    out = device.upload(np.zeros((300, 6), np.float32))
    device.execute(load(device, kernels.special_functions, [float32[:, ::1], f32_1d]), 3, 128, [out, device.upload(x)])
    wide = x.astype(np.float64)
    angle = (x * np.float32(1000)).astype(np.float64)
    want = np.stack(
        [
            np.exp(wide),
            np.log(np.abs(x) + np.float32(1), dtype=np.float64),
            np.sin(angle),
            np.abs(wide) ** np.float64(np.float32(1.7)),
            np.tanh(wide),
            1 / np.sqrt((np.abs(x) + np.float32(0.5)).astype(np.float64)),
        ],
        axis=1,
    )
    np.testing.assert_allclose(device.download(out), want, rtol=2e-6, atol=2e-7)


def test_a_kernel_is_compiled_once_and_its_arguments_are_checked(device: PtxDevice) -> None:
    kernel = Kernel("block_sum", kernels.block_sum, (f32_1d, f32_1d, int32), 128)
    x = RNG.standard_normal(128).astype(np.float32)
    out = device.empty((1,), np.float32)
    source = device.upload(x)
    device.launch(kernel, 1, [out, source, 128])
    np.testing.assert_allclose(device.download(out), x.sum(dtype=np.float64), rtol=1e-5)
    for arguments, message in (
        ([out, source], "2 arguments, the kernel takes 3"),
        ([out, device.upload(x.astype(np.float64)), 128], "argument 1 is float64"),
        ([out, source.reshape(2, 64), 128], "argument 1 has 2 dimensions"),
        ([out, source, 1 << 40], "does not fit"),
        ([out, 3, 128], "argument 1 is no array"),
    ):
        with pytest.raises(PtxError, match=message) as caught:
            device.launch(kernel, 1, arguments)
        assert caught.value.kind == "launch"


def test_launch_limits(device: PtxDevice) -> None:
    kernel = load(device, kernels.warp_synchronous, [f32_1d])
    out = device.empty((64,), np.float32)
    for grid, block, shared, message in (
        (0, 64, 0, "grid"),
        (1, 1025, 0, "1025"),
        (1, (2, 2, 65), 0, "threads"),
        (1, 64, 1 << 20, "shared memory"),
    ):
        with pytest.raises(PtxError, match=message):
            device.execute(kernel, grid, block, [out], shared_bytes=shared)
    device.execute(kernel, 1, 64, [out])
    lane = np.arange(64)
    assert (device.download(out) == (lane ^ 2 ^ 1) + 1).all()


def test_step_limit_stops_an_endless_loop() -> None:
    device = PtxDevice(memory_bytes=1 << 20, checks=Checks(step_limit=1000))
    kernel = load(device, kernels.bug_endless, [f32_1d])
    with pytest.raises(PtxError, match="1000 basic blocks") as caught:
        device.execute(kernel, 1, 32, [device.upload(np.zeros(2, np.float32))])
    assert caught.value.kind == "step-limit"
