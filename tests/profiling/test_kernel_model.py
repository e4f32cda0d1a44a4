"""The performance model of kernels: what more of a thing may do to a prediction, and anchors that were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from numba_engine.kernel_lab.kernel_model import LAUNCH_S, MODELLED_GPUS, READ_SHARE, KernelWork, ModelledGpu, predict

GPUS = pytest.mark.parametrize("gpu", MODELLED_GPUS.values(), ids=MODELLED_GPUS.keys())

# A plain read of 1 GiB: 512 threads, 4 loads of 16 bytes in flight, a third of an instruction a lane's word.
READ = KernelWork(
    num_blocks=1056,
    threads=512,
    registers=32,
    shared_bytes=0,
    memory_bytes=1 << 30,
    cache_bytes=1 << 30,
    instructions=(1 << 30) / 512 * 4,
    by_unit={"integer": (1 << 30) / 512 * 2, "memory": (1 << 30) / 512},
    shared_wavefronts=0,
    tensor_flops=0,
    bytes_in_flight=2048,
)


@GPUS
def test_a_plain_read_reaches_what_plain_reads_were_measured_at(gpu: ModelledGpu) -> None:
    read = predict(READ, gpu)
    assert 0.90 <= read.memory_share <= READ_SHARE
    assert read.bound == "dram"


def test_calm_reads_fp16_weights_at_92_percent_on_a_4090() -> None:
    """One 8B token in one launch: 92 % of 1,008 GB/s was measured."""
    token = replace(READ, memory_bytes=16.06e9, cache_bytes=16.06e9, instructions=16.06e9 / 32)
    assert predict(token, MODELLED_GPUS["rtx4090"]).memory_share == pytest.approx(0.92, abs=0.015)


@GPUS
def test_more_bytes_in_flight_are_never_slower(gpu: ModelledGpu) -> None:
    times = [predict(replace(READ, bytes_in_flight=nbytes), gpu).time_s for nbytes in (16, 64, 256, 512, 2048, 8192)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 3 * times[-1]


@GPUS
def test_too_few_bytes_in_flight_are_bound_by_latency_as_little_says(gpu: ModelledGpu) -> None:
    """One load of 4 bytes a lane and two warps a multiprocessor."""
    sparse = replace(READ, threads=64, num_blocks=gpu.multiprocessors, bytes_in_flight=128)
    predicted = predict(sparse, gpu)
    latency_s = 1.6 * gpu.latency_clocks / gpu.clock_hz
    assert predicted.in_flight_bytes == 256
    assert predicted.bound == "latency"
    assert predicted.time_s == pytest.approx((1 << 30) / gpu.multiprocessors / 256 * latency_s, rel=0.02)


def test_bytes_that_must_be_in_flight() -> None:
    """4.8 TB/s over 132 multiprocessors for 766 clocks of 1.83 GHz; other GPUs need less."""
    needed = {key: gpu.needed_in_flight for key, gpu in MODELLED_GPUS.items()}
    assert needed["h200"] == pytest.approx(4.8e12 / 132 / 1.83e9 * 766, rel=0.01)
    assert max(needed, key=needed.__getitem__) == "h200"
    assert min(needed, key=needed.__getitem__) == "rtx4090"


@GPUS
def test_ten_times_the_instructions_are_bound_by_issue(gpu: ModelledGpu) -> None:
    at_most = 4 / gpu.bytes_per_clock * READ.memory_bytes
    fitting = replace(READ, num_blocks=8 * gpu.multiprocessors, instructions=at_most / 4, by_unit={})
    assert predict(fitting, gpu).bound == "dram"
    tenfold = predict(replace(fitting, instructions=10 * fitting.instructions), gpu)
    assert tenfold.bound == "issue"
    assert tenfold.time_s == pytest.approx(2.5 * READ.memory_bytes / gpu.bandwidth, rel=0.05)


@GPUS
def test_the_slowest_unit_binds(gpu: ModelledGpu) -> None:
    anything = replace(READ, instructions=22 * READ.instructions, by_unit={})
    conversions = replace(anything, by_unit={"conversion and special": anything.instructions})
    assert predict(anything, gpu).bound == "dram"
    assert predict(conversions, gpu).bound == "units"


def test_half_the_integer_lanes_of_a_warp_instruction() -> None:
    """64 integer lanes: two clocks for as many warp instructions as the schedulers issue in one."""
    work = replace(READ, by_unit={"integer": READ.instructions}, memory_bytes=0, cache_bytes=0, num_blocks=1320)
    limits = predict(work, MODELLED_GPUS["h200"]).limits_s
    assert limits["units"] == pytest.approx(2 * limits["issue"])


@GPUS
def test_bank_conflicts_and_tensor_cores_bind_too(gpu: ModelledGpu) -> None:
    clocks = READ.memory_bytes / gpu.bandwidth * gpu.clock_hz * gpu.multiprocessors
    assert predict(replace(READ, shared_wavefronts=3 * clocks), gpu).bound == "shared"
    work = replace(READ, tensor_flops=3 * clocks * gpu.tensor_flops_per_clock)
    assert predict(work, gpu).bound == "tensor"


def test_hopper_gives_mma_sync_under_two_thirds_of_its_tensor_cores() -> None:
    h100 = MODELLED_GPUS["h100-sxm"]
    flops = h100.tensor_flops_per_clock * h100.multiprocessors * h100.clock_hz
    assert flops == pytest.approx(613e12, rel=0.01)


@GPUS
def test_one_block_too_many_is_a_wave(gpu: ModelledGpu) -> None:
    """A block for each multiprocessor, and then one more, takes twice as long."""
    even = replace(READ, num_blocks=gpu.multiprocessors, instructions=1000 * READ.instructions, by_unit={})
    share = (gpu.multiprocessors + 1) / gpu.multiprocessors
    odd = replace(even, num_blocks=gpu.multiprocessors + 1, instructions=share * even.instructions)
    assert predict(even, gpu).bound == "issue"
    assert predict(odd, gpu).bound == "waves"
    assert predict(odd, gpu).time_s == pytest.approx(2 * predict(even, gpu).time_s, rel=0.02)


@GPUS
def test_a_small_launch_costs_its_launch(gpu: ModelledGpu) -> None:
    small = replace(READ, num_blocks=8, memory_bytes=4096, cache_bytes=4096, instructions=1000, by_unit={})
    in_graph, alone = predict(small, gpu), predict(small, gpu, graph=False)
    assert in_graph.bound == "launch"
    assert alone.time_s - in_graph.time_s == pytest.approx(LAUNCH_S[False] - LAUNCH_S[True])


def test_a_block_that_does_not_fit_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match=r"1024 threads with 128 registers .* NVIDIA GeForce RTX 4090"):
        predict(replace(READ, threads=1024, registers=128), MODELLED_GPUS["rtx4090"])
