"""What a profile says: plain values, ready to print, to serialise or to put on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class OpProfile:
    """One op (or fused phase) of one step or more, all its calls together. Time is measured, the rest by formula."""

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

    @property
    def ops_time_s(self) -> float:
        return sum(op.time_s for op in self.ops)

    @property
    def net_time_s(self) -> float:
        """The step without the cost of looking."""
        return max(self.time_s - self.overhead_s, 0.0)

    @property
    def host_time_s(self) -> float:
        """Python between the ops: scheduling, batch building, text."""
        return max(self.net_time_s - self.ops_time_s, 0.0)


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """The steps of a profile together; prefill steps (any prefill token in them) and decode steps apart."""

    num_prefill_steps: int
    num_decode_steps: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Median over the decode steps, the cost of looking subtracted."""
    read_bandwidth_gbps: float
    """Plain read bandwidth of this machine, measured with the same threads."""
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


def ops_by_name(steps: Sequence[StepProfile]) -> tuple[OpProfile, ...]:
    """The ops of all steps, those of one name summed up, in order of first call."""
    by_name: dict[str, list[OpProfile]] = {}
    for op in (op for step in steps for op in step.ops):
        by_name.setdefault(op.name, []).append(op)
    counted = [field.name for field in fields(OpProfile) if field.name != "name"]
    return tuple(
        OpProfile(name=name, **{field: sum(getattr(op, field) for op in ops) for field in counted})
        for name, ops in by_name.items()
    )
