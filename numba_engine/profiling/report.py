"""What a profile says: plain values, ready to print, to serialise or to put on the wire."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpProfile:
    """One op (or fused phase) of one step, all its calls together."""

    name: str
    num_calls: int
    time_s: float
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    flops: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def gbps(self) -> float:
        """Achieved bandwidth, GB/s: bytes by formula over measured time."""
        return self.total_bytes / self.time_s / 1e9 if self.time_s else 0.0


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step. Its op times sum to less than ``time_s``; the rest is the host's (scheduling, batch building, text)."""

    index: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_seqs: int
    time_s: float
    ops: tuple[OpProfile, ...]


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """The steps of a profile together; prefill steps (any prefill token in them) and decode steps apart."""

    num_prefill_steps: int
    num_decode_steps: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Median over the decode steps."""
    read_bandwidth_gbps: float
    """Plain read bandwidth of this machine, measured with the same threads."""
    bytes_per_token: int
    """Weights + KV + activations a decode step moves, per sequence in it, by formula."""
    floor_s: float
    """Time to read bytes_per_token at read_bandwidth_gbps: no engine can be faster at this batch."""
    share_of_floor: float
    """floor tok/s over reached: 1.0 is the limit."""
    ops: tuple[OpProfile, ...]
    """Decode steps only, summed."""
    shares: tuple[tuple[str, float], ...]
    """(op, share of decode time), largest first, with the host's part as 'host'."""
