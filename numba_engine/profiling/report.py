"""What a profile says: plain values, ready to print, to serialise or to put on the wire."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields

from numba_engine.backends.instruments import CountedTraffic, TimeSource

LATENCY_SHARE = 0.6
"""An op that reaches less of what memory and arithmetic allow is held up by neither: it waits for something else.

The rule and its value are those of NVIDIA Nsight Compute's speed-of-light section.
"""


class OpBound(enum.StrEnum):
    """What holds an op up."""

    MEMORY = "MEMORY"
    COMPUTE = "COMPUTE"
    LATENCY = "LATENCY"
    """Neither: launching, waiting for threads or for single loads."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the device can do at most, and how that is known."""

    device: str
    """Of which device: on ``ptx`` a GPU from the datasheet table, as the executor has no speed of its own."""
    read_bandwidth_gbps: float
    read_bandwidth_source: str
    """``measured``, with the engine's threads, or the datasheet."""
    gflops: float | None
    """Multiplications and additions, as the model's matrices are multiplied; None where it is not known."""
    gflops_source: str
    """``measured``, ``unknown`` or the datasheet."""
    arithmetic: str
    """What the arithmetic peak is of: the kind of instruction."""
    launch_s: float = 0.0
    """The least time one more launch adds to a step. Only predictions use it; 0 where times are measured."""

    @property
    def ridge(self) -> float | None:
        """FLOPs a byte from which on arithmetic takes longer than memory."""
        return self.gflops / self.read_bandwidth_gbps if self.gflops and self.read_bandwidth_gbps else None

    def least_time_s(self, num_bytes: int, flops: int) -> float:
        """The roofline (Williams et al., CACM 2009): the longer of moving the bytes and of doing the arithmetic."""
        memory_s = num_bytes / (self.read_bandwidth_gbps * 1e9) if self.read_bandwidth_gbps else 0.0
        return max(memory_s, flops / (self.gflops * 1e9) if self.gflops else 0.0)


@dataclass(frozen=True, slots=True)
class OpProfile:
    """One op (or fused phase) of one step or more, all its calls together.

    Time is measured (or predicted, see ``StepProfile.time_source``), the rest by formula, except ``counted``.
    """

    name: str
    num_calls: int
    time_s: float
    weight_bytes: int
    kv_bytes: int
    """Read and written."""
    activation_bytes: int
    """Read and written."""
    flops: int
    kv_written_bytes: int = 0
    """Of kv_bytes."""
    activation_written_bytes: int = 0
    """Of activation_bytes."""
    num_launches: int = 0
    """Kernels launched; on ``cpu`` a call is one."""
    counted: CountedTraffic | None = None
    """What the device itself counted, level by level: on ``ptx`` only."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def gbps(self) -> float:
        """Achieved bandwidth, GB/s: bytes by formula over measured time."""
        return self.total_bytes / self.time_s / 1e9 if self.time_s else 0.0

    @property
    def gflops(self) -> float:
        """Achieved arithmetic, GFLOP/s: FLOPs by formula over measured time."""
        return self.flops / self.time_s / 1e9 if self.time_s else 0.0

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOPs a byte, by formula."""
        return self.flops / self.total_bytes if self.total_bytes else 0.0

    def share_of_attainable(self, peaks: Peaks) -> float:
        """Speed reached over min(arithmetic peak, intensity × read bandwidth). Above 1 where caches serve the bytes."""
        return peaks.least_time_s(self.total_bytes, self.flops) / self.time_s if self.time_s else 0.0

    def bound(self, peaks: Peaks) -> OpBound:
        """What holds the op up: the side of the ridge it is on, unless it is far below both limits."""
        if self.share_of_attainable(peaks) < LATENCY_SHARE:
            return OpBound.LATENCY
        return OpBound.COMPUTE if peaks.ridge is not None and self.intensity > peaks.ridge else OpBound.MEMORY

    def arithmetic_idle_share(self, peaks: Peaks) -> float | None:
        """Of its time, how long the arithmetic units had nothing to do; None where their peak is not known."""
        return idle_share(self.flops, self.time_s, peaks)


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an op: a bar of the timeline."""

    name: str
    layer: int | None
    """None outside the layers."""
    start_s: float
    """Since the step began."""
    time_s: float
    num_launches: int
    num_bytes: int
    """By formula, as the FLOPs."""
    flops: int


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step. What ops and overhead leave of ``time_s`` is the host's: scheduling, batch building, text."""

    index: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_seqs: int
    time_s: float
    """As the clock saw it, the cost of looking included."""
    ops: tuple[OpProfile, ...]
    """In order of first call."""
    overhead_s: float = 0.0
    """What looking cost, of time_s: the recorder's calibrated constant times the calls. No op contains it."""
    time_source: TimeSource = TimeSource.HOST_CLOCK
    """How the times of ops were taken. SIMULATED: all times, the step's too, are predictions."""
    profiled: bool = True
    """False: run as without a profile, for comparison; only ``time_s`` is known, and there are no ops."""
    launch_gap_s: float = 0.0
    """From the end of each op to the beginning of the next, without the cost of looking: what it takes to call one. By
    the host's clock it is part of the ops' times, on a GPU of the host's."""
    timeline: tuple[OpCall, ...] = ()
    """Every call, in order, where that was asked for."""

    def is_decode_of(self, num_seqs: int) -> bool:
        """A token of each of at least so many sequences, and no prompt."""
        return not self.num_prefill_tokens and self.num_decode_tokens >= num_seqs

    @property
    def ops_time_s(self) -> float:
        return sum(op.time_s for op in self.ops)

    @property
    def net_time_s(self) -> float:
        """The step without the cost of looking."""
        return max(self.time_s - self.overhead_s, 0.0)

    @property
    def host_time_s(self) -> float:
        """Python between the ops: scheduling, batch building, text. 0 for a step that was not profiled."""
        return max(self.net_time_s - self.ops_time_s, 0.0) if self.profiled else 0.0

    @property
    def num_launches(self) -> int:
        return sum(op.num_launches for op in self.ops)

    def arithmetic_idle_share(self, peaks: Peaks) -> float | None:
        """Of the step, how long the arithmetic units had nothing to do; None where that is not known."""
        return idle_share(sum(op.flops for op in self.ops), self.net_time_s, peaks) if self.profiled else None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes at the end of a profile."""

    weight_bytes: int
    kv_cache_bytes: int
    """Set aside."""
    kv_used_bytes: int
    """Of kv_cache_bytes: held by sequences at the profile's fullest step."""
    free_bytes: int
    """Of the device, as the backend sees it."""
    process_bytes: int
    """Resident in the host's memory, all of the process."""


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """The steps of a profile together; prefill steps (any prefill token in them) and decode steps apart.

    Steps that were not profiled count in nothing but ``num_unprofiled_steps`` and ``unprofiled_step_s``.
    """

    num_prefill_steps: int
    num_decode_steps: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Median over the decode steps, the cost of looking subtracted."""
    read_bandwidth_gbps: float
    """Plain read bandwidth of this machine, measured with the same threads; on ``ptx`` the datasheet's."""
    bytes_per_token: int
    """Weights + KV a decode step moves, per sequence in it, by formula; activations stay in the caches."""
    floor_s: float
    """Time to move bytes_per_token at read_bandwidth_gbps: no engine that reads memory can be faster at this batch."""
    share_of_floor: float
    """Reached tok/s over the floor's: 1.0 is the limit."""
    ops: tuple[OpProfile, ...]
    """Decode steps only, summed."""
    shares: tuple[tuple[str, float], ...]
    """(op, share of decode time), largest first, with the host's part as 'host'."""
    weight_bytes_per_token: int = 0
    """Of bytes_per_token."""
    kv_bytes_per_token: int = 0
    """Of bytes_per_token."""
    overhead_s_per_step: float = 0.0
    """What looking cost a decode step in the mean; subtracted above."""
    time_source: TimeSource = TimeSource.HOST_CLOCK
    peaks: Peaks | None = None
    decode_tokens_per_s_p10: float = 0.0
    """Nine in ten decode steps are faster."""
    decode_tokens_per_s_p90: float = 0.0
    """One in ten decode steps is faster."""
    prefill_tokens_per_s_p10: float = 0.0
    prefill_tokens_per_s_p90: float = 0.0
    prefill_ops: tuple[OpProfile, ...] = ()
    """Prefill steps only, summed."""
    prefill_shares: tuple[tuple[str, float], ...] = ()
    """(op, share of prefill time), as shares."""
    decode_arithmetic_idle_share: float | None = None
    """Of decode time: 1 - FLOPs by formula / (time × arithmetic peak). None where the peak is not known."""
    prefill_arithmetic_idle_share: float | None = None
    launches_per_step: float = 0.0
    """Kernels launched by a decode step, in the mean."""
    launch_gap_s_per_step: float = 0.0
    """Between the ops of a decode step, in the mean."""
    host_s_per_step: float = 0.0
    """Outside the ops of a decode step, in the mean."""
    num_unprofiled_steps: int = 0
    """Decode steps run without looking, among the others, for comparison."""
    unprofiled_step_s: float = 0.0
    """Their median; 0 without any."""
    profiled_step_s: float = 0.0
    """Median of the profiled decode steps of as many sequences, the cost of looking included."""
    profiled_ops_s: float = 0.0
    """Median of the sum of the op times of the same steps."""
    memory: MemoryUse | None = None
    decode_seqs: int = 1
    """Steps of fewer sequences are left out of the decode steps."""


def ops_by_name(steps: Sequence[StepProfile]) -> tuple[OpProfile, ...]:
    """The ops of all steps, those of one name summed up, in order of first call."""
    by_name: dict[str, list[OpProfile]] = {}
    for op in (op for step in steps for op in step.ops):
        by_name.setdefault(op.name, []).append(op)
    return tuple(sum_ops(name, ops) for name, ops in by_name.items())


def sum_ops(name: str, ops: Sequence[OpProfile]) -> OpProfile:
    """Several of them as one under a name."""
    numbers = [field.name for field in fields(OpProfile) if field.name not in ("name", "counted")]
    counted = [op.counted for op in ops if op.counted is not None]
    return OpProfile(
        name=name,
        **{field: sum(getattr(op, field) for op in ops) for field in numbers},
        counted=sum(counted, CountedTraffic()) if counted else None,
    )


def idle_share(flops: int, time_s: float, peaks: Peaks) -> float | None:
    """Of the time, how long the arithmetic units had nothing to do; None where their peak is not known."""
    if not peaks.gflops or not time_s:
        return None
    return max(1.0 - flops / (time_s * peaks.gflops * 1e9), 0.0)
