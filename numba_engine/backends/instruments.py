"""Instruments: what a device can tell of its own work, op by op. A backend that has some hands them to the profiler."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol


class TimeSource(enum.StrEnum):
    """How the times of ops are taken."""

    HOST_CLOCK = "HOST_CLOCK"
    """The host's monotonic clock around the call of each op and the wait for its end."""
    EVENTS = "EVENTS"
    """Events that the GPU records before and after each op."""
    CUPTI = "CUPTI"
    """The GPU's own records of when each kernel ran."""
    SIMULATED = "SIMULATED"
    """None were taken, as the device is simulated: they are a model's predictions."""


class TrafficKind(enum.StrEnum):
    """What the bytes of an array are."""

    WEIGHTS = "weights"
    KV = "kv"
    ACTIVATIONS = "activations"
    SCRATCH = "scratch"
    """Neither given to the op nor asked for: a kernel's own memory between its launches."""


@dataclass(frozen=True, slots=True)
class KindBytes:
    """Bytes by what they are."""

    weights: int = 0
    kv: int = 0
    activations: int = 0
    scratch: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.scratch

    def __add__(self, other: KindBytes) -> KindBytes:
        return KindBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(KindBytes)))


@dataclass(frozen=True, slots=True)
class CountedTraffic:
    """What a device counted while it ran one op or more, level by level from memory inwards."""

    num_launches: int = 0
    dram: KindBytes = field(default_factory=KindBytes)
    """Each byte of an array once where it is read and once where it is written, however often: what memory must move
    if the caches keep what is used again within the op."""
    l2: KindBytes = field(default_factory=KindBytes)
    """Sectors of 32 bytes between the L2 cache and the multiprocessors, loads, stores and atomics."""
    lanes: KindBytes = field(default_factory=KindBytes)
    """Bytes between those and the registers of threads, the same byte as often as it is asked for."""
    shared_bytes: int = 0
    """Between shared memory and the registers of threads."""
    shared_wavefronts: int = 0
    """Cycles of the shared memory's 32 banks of 4 bytes."""
    shared_wavefronts_ideal: int = 0
    """Without bank conflicts."""
    warp_instructions: int = 0
    lane_instructions: int = 0
    """Each instruction once for every thread that executes it."""

    @property
    def register_bytes(self) -> int:
        """All that passes between memories and registers."""
        return self.lanes.total + self.shared_bytes

    def __add__(self, other: CountedTraffic) -> CountedTraffic:
        return CountedTraffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(CountedTraffic)))


class TrafficCounter(Protocol):
    """Counts what launches move."""

    def start(self) -> None:
        """Count from now on."""
        ...

    def take(self, arrays: Mapping[TrafficKind, Sequence[Any]]) -> CountedTraffic:
        """What the launches since ``start`` or the last ``take`` moved, each array as the kind it is listed under."""
        ...

    def stop(self) -> None:
        """Count no more."""
        ...


@dataclass(frozen=True, slots=True)
class OpTime:
    """When one op ran, by the device."""

    start_s: float
    """Since the first op that was taken together with it."""
    time_s: float
    num_launches: int


class OpTimer(Protocol):
    """Takes the times of ops that run asynchronously."""

    source: TimeSource

    def start(self) -> None:
        """Ops are to be timed from now on."""
        ...

    def begin(self) -> None:
        """The next launches are one op's."""
        ...

    def end(self) -> None:
        """It has no more."""
        ...

    def take(self) -> list[OpTime]:
        """Of every op since ``start`` or the last call, once they are done."""
        ...

    def stop(self) -> None:
        """Time no more."""
        ...
