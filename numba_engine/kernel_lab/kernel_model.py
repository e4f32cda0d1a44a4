"""How long a GPU kernel takes, predicted from what it does: so that a design is argued here and refuted on a device.

A launch is put against every limit it could run into, each by itself:

- **dram**   its bytes from memory, at the share of the datasheet's bandwidth that plain reading reaches;
- **l2**     all sectors its loads and stores ask for, at what L2 delivers;
- **latency** Little's law: a multiprocessor gets (bytes in flight / latency) a second, whatever the bus could do;
- **issue**  warp instructions, 4 a clock and multiprocessor (fewer where few warps are resident);
- **units**  the same by execution unit, as many a clock as each has lanes;
- **shared** wavefronts of shared memory, one a clock;
- **tensor** multiply-adds of ``mma.sync``.

Limits of a multiprocessor count for the one that gets the most blocks. Moving (dram, l2), waiting (latency) and
computing (the rest) overlap, but not perfectly: the time is (Σ tⁿ)^(1/n) over these three, n = 4. Launch and ramp (the
first bytes in, the last ones out) come on top. The longest limit is called the bound; **waves** if it is of a
multiprocessor and the busiest one has over a quarter more blocks than the mean; **launch** if launch and ramp take
longer than all the rest.

What is assumed, and should be refuted first, are the constants below. Latencies without load are of Luo et al. 2024,
"Benchmarking and Dissecting the Nvidia Hopper GPU Architecture" (arXiv:2402.13499, which has A100, H100 and RTX 4090);
bandwidths and rates of ``hardware.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from numba_engine.kernel_lab.occupancy import WARP, resident_blocks
from numba_engine.profiling.hardware import GPUS, Gpu

ISSUE_PER_CLOCK = 4.0
"""Warp instructions, one a scheduler (NVIDIA Ampere and Hopper whitepapers)."""
ISSUE_PER_WARP = 0.5
"""Of one warp a clock: an instruction takes 4 clocks until the next can use its result, and two in a row are often
independent."""
READ_SHARE = 0.93
"""Of the datasheet's bandwidth that plain reading reaches: refresh and turning rows take the rest. calm's GEMV reaches
0.92 on an RTX 4090."""
LOADED_LATENCY = 1.6
"""Latency when the bus is full over latency when it is idle: 750 to 870 clocks."""
OVERLAP = 4.0
"""The exponent n above."""
LAUNCH_S = MappingProxyType({True: 1.3e-6, False: 2.1e-6})
"""From the end of one kernel to the start of the next that needs it, in a CUDA graph or not (H100; Hazy Research 2025,
"Look Ma, No Bubbles!"). Without a graph the host may well be slower."""
MMA_SHARE = MappingProxyType({(8, 0): 0.95, (8, 9): 0.95, (9, 0): 0.62})
"""Of the tensor cores' rate that ``mma.sync`` reaches: on Hopper only ``wgmma`` reaches all (arXiv:2402.13499)."""

_UNITS: Mapping[tuple[int, int], Mapping[str, float]] = {
    (8, 0): {"float32": 2, "float16": 4, "integer": 2, "integer multiply": 2, "conversion and special": 0.5},
    (8, 9): {"float32": 4, "float16": 2, "integer": 2, "integer multiply": 2, "conversion and special": 0.5},
    (9, 0): {"float32": 4, "float16": 4, "integer": 2, "integer multiply": 2, "conversion and special": 0.5},
}
"""Warp instructions a clock (CUDA C++ Programming Guide, throughput of native arithmetic instructions, over 32)."""
_MEMORY_UNIT = 1.0
"""Warp instructions a clock of the load and store unit."""
_MOVING = ("dram", "l2")
_OVERLAPPING = (_MOVING, ("latency",), ("issue", "units", "shared", "tensor"))


@dataclass(frozen=True, slots=True)
class ModelledGpu:
    """What the model knows of a GPU beyond its datasheet."""

    gpu: Gpu
    cc: tuple[int, int]
    multiprocessors: int
    clock_hz: float
    latency_clocks: float
    """From a load to its data from memory, idle."""
    l2_latency_clocks: float
    l2_bytes_per_clock: float
    """Of all of L2: an assumption, a half to three quarters of the 5,120 bytes that A100's whitepaper names."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second, datasheet."""
        return self.gpu.bandwidth_gbps * 1e9

    @property
    def bytes_per_clock(self) -> float:
        """That memory delivers to one multiprocessor at full bandwidth."""
        return self.bandwidth / self.multiprocessors / self.clock_hz

    @property
    def needed_in_flight(self) -> float:
        """Bytes that each multiprocessor must have asked for and not got, for full bandwidth: Little's law."""
        return self.bytes_per_clock * self.latency_clocks * LOADED_LATENCY

    @property
    def tensor_flops_per_clock(self) -> float:
        """Of one multiprocessor by ``mma.sync``, bf16 with float32 sums."""
        assert self.gpu.fp16_tflops is not None
        return self.gpu.fp16_tflops * 1e12 / self.multiprocessors / self.clock_hz * MMA_SHARE[self.cc]


def _modelled(key: str, *values: float, cc: tuple[int, int]) -> ModelledGpu:
    multiprocessors, clock_ghz, latency, l2_latency, l2_bytes = values
    return ModelledGpu(GPUS[key], cc, int(multiprocessors), clock_ghz * 1e9, latency, l2_latency, l2_bytes)


MODELLED_GPUS = MappingProxyType(
    {
        gpu.gpu.key: gpu
        for gpu in (  # multiprocessors, boost clock in GHz, latency of memory and of L2 in clocks, L2 bytes a clock
            _modelled("h200", 132, 1.83, 479, 263, 3840, cc=(9, 0)),
            _modelled("h100-sxm", 132, 1.83, 479, 263, 3840, cc=(9, 0)),
            _modelled("a100-80gb", 108, 1.41, 466, 262, 2560, cc=(8, 0)),
            _modelled("rtx4090", 128, 2.52, 541, 273, 2048, cc=(8, 9)),
        )
    }
)
"""H200's latencies are taken from H100, whose die it has."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What one launch does, all of its blocks together but where it says otherwise."""

    num_blocks: int
    threads: int
    registers: int
    shared_bytes: int
    """Of a block."""
    memory_bytes: float
    """From and to DRAM: what no earlier launch left in L2."""
    cache_bytes: float
    """All sectors that its loads and stores ask L2 for, those of memory_bytes included."""
    instructions: float
    """Of warps."""
    by_unit: Mapping[str, float]
    shared_wavefronts: float
    tensor_flops: float
    bytes_in_flight: float
    """Of a warp."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one launch on one GPU. ``limits_s`` are the times of the limits, each by itself."""

    time_s: float
    bound: str
    limits_s: Mapping[str, float]
    resident_blocks: int
    """A multiprocessor holds at most."""
    waves: float
    """Blocks over all that fit at once."""
    in_flight_bytes: float
    """Of a multiprocessor."""
    memory_share: float
    """Of the datasheet's bandwidth."""


def predict(work: KernelWork, gpu: ModelledGpu, *, graph: bool = True) -> Prediction:
    """Raises ValueError if not even one block fits on a multiprocessor."""
    fitting = resident_blocks(gpu.cc, work.threads, work.registers, work.shared_bytes)
    if not fitting:
        raise ValueError(
            f"a block of {work.threads} threads with {work.registers} registers each and {work.shared_bytes} bytes of"
            f" shared memory does not fit on a multiprocessor of {gpu.gpu.name}"
        )
    most = -(-work.num_blocks // gpu.multiprocessors)
    resident = min(fitting, most)
    limits = _limits(work, gpu, resident, most)
    parts = [max(limits[name] for name in group) for group in _OVERLAPPING]
    streaming_s = sum(part**OVERLAP for part in parts) ** (1 / OVERLAP)
    fixed_s = LAUNCH_S[graph] + (gpu.latency_clocks + gpu.l2_latency_clocks) / gpu.clock_hz
    bound = max(limits, key=limits.__getitem__)
    if bound not in _MOVING and most > 1.25 * work.num_blocks / gpu.multiprocessors:
        bound = "waves"
    if fixed_s > streaming_s:
        bound = "launch"
    time_s = streaming_s + fixed_s
    return Prediction(
        time_s=time_s,
        bound=bound,
        limits_s=limits,
        resident_blocks=fitting,
        waves=work.num_blocks / (fitting * gpu.multiprocessors),
        in_flight_bytes=_warps(work) * resident * work.bytes_in_flight,
        memory_share=work.memory_bytes / time_s / gpu.bandwidth,
    )


def _limits(work: KernelWork, gpu: ModelledGpu, resident: int, most: int) -> dict[str, float]:
    """Seconds of each; the busiest multiprocessor has ``most`` blocks, ``resident`` at a time."""
    share = most / work.num_blocks  # of all work, that the busiest multiprocessor does
    issue_rate = min(ISSUE_PER_CLOCK, ISSUE_PER_WARP * _warps(work) * resident)
    rates = {"memory": _MEMORY_UNIT, **_UNITS[gpu.cc]}
    block_clocks = _waited_byte_clocks(work, gpu) / work.num_blocks / max(_warps(work) * work.bytes_in_flight, 1.0)
    clocks = {
        "latency": -(-most // resident) * block_clocks,
        "issue": share * work.instructions / issue_rate,
        "units": share * max((work.by_unit.get(unit, 0) / rate for unit, rate in rates.items()), default=0.0),
        "shared": share * work.shared_wavefronts,
        "tensor": share * work.tensor_flops / gpu.tensor_flops_per_clock,
    }
    return {
        "dram": work.memory_bytes / (gpu.bandwidth * READ_SHARE),
        "l2": work.cache_bytes / (gpu.l2_bytes_per_clock * gpu.clock_hz),
        **{limit: number / gpu.clock_hz for limit, number in clocks.items()},
    }


def _waited_byte_clocks(work: KernelWork, gpu: ModelledGpu) -> float:
    """Bytes times the clocks that each is under way."""
    cached = max(work.cache_bytes - work.memory_bytes, 0.0)
    return LOADED_LATENCY * (work.memory_bytes * gpu.latency_clocks + cached * gpu.l2_latency_clocks)


def _warps(work: KernelWork) -> int:
    return math.ceil(work.threads / WARP)
