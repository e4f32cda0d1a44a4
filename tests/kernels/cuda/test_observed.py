"""Samples of launches stand for the whole of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda
from numba.cuda.types import uint32

from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.ptxas import find_ptxas
from numba_engine.kernel_lab.observed import ObservedLaunch, ObservingDevice

pytestmark = pytest.mark.skipif(find_ptxas() is None, reason="ptxas (pip install nvidia-cuda-nvcc) was not found")

THREADS, BLOCKS, SHARED_WORDS = 64, 1000, 16


def mix(out: Any, data: Any, shared: Any) -> None:
    """Each block its own words of data, and all of them the same few of shared."""
    place = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
    out[place] = data[place] ^ shared[uint32(place & uint32(SHARED_WORDS - 1))]


MIX = Kernel("mix", mix, (uint32[::1],) * 3, THREADS)


def observed(samples: int) -> ObservedLaunch:
    device = ObservingDevice((9, 0), samples=samples, memory_bytes=1 << 24)
    data = np.arange(THREADS * BLOCKS, dtype=np.uint32)
    arrays = [device.upload(np.zeros_like(data), "out"), device.upload(data, "data")]
    device.label = "mixing"
    device.launch(MIX, BLOCKS, [*arrays, device.upload(np.ones(SHARED_WORDS, np.uint32), "shared")])
    (launch,) = device.observed
    return launch


@pytest.mark.parametrize("samples", [1, 3])
def test_a_sample_counts_as_the_whole_launch_does(samples: int) -> None:
    sample, whole = observed(samples), observed(BLOCKS)
    assert sample.label == "mixing"
    assert whole.blocks_run == BLOCKS
    assert sample.blocks_run < 0.25 * BLOCKS
    assert sample.num_blocks == BLOCKS
    assert sample.scale * sample.executed.instructions == pytest.approx(whole.executed.instructions)
    assert sample.scale * sample.counters.sectors == pytest.approx(whole.counters.sectors)


@pytest.mark.parametrize("samples", [1, 3, BLOCKS])
def test_what_every_block_reads_is_moved_once(samples: int) -> None:
    nbytes = 4 * THREADS * BLOCKS
    assert observed(samples).array_bytes() == {"out": nbytes, "data": nbytes, "shared": 4 * SHARED_WORDS}
    assert observed(samples).reads("data") == pytest.approx(1)
    assert observed(samples).reads("shared") == pytest.approx(BLOCKS * THREADS / 32)


def test_machine_instructions_are_those_of_the_kernel() -> None:
    """Two loads, one exclusive or and a store, and what addresses take."""
    launch = observed(1)
    warps = launch.blocks_run * THREADS / 32
    assert launch.executed.by_pipe["memory"] / warps >= 3
    assert 10 < launch.executed.instructions / warps < 60
    assert launch.executed.bytes_in_flight == 2 * 4 * 32
    assert launch.tensor_flops == 0


def test_kernels_that_are_not_wanted_do_not_run() -> None:
    device = ObservingDevice((9, 0), wanted=lambda name: name != "mix", memory_bytes=1 << 20)
    device.launch(MIX, 1, [device.empty((4,), np.uint32)] * 3)
    assert device.observed == []
