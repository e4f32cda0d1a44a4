"""TrafficCounter: the executor's counters, gathered op by op and told apart by what the arrays are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numba_engine.backends.cuda.arrays import CudaArray
from numba_engine.backends.instruments import CountedTraffic, KindBytes, TrafficKind
from numba_engine.backends.ptx.counters import SECTOR_BYTES, ArrayCounters, LaunchCounters
from numba_engine.backends.ptx.device import PtxArray, PtxDevice


class TrafficCounter:
    """Counts the launches of one device. What lies in constant memory, kernel parameters too, is not counted."""

    def __init__(self, device: PtxDevice) -> None:
        self._device = device

    def start(self) -> None:
        self._device.count()

    def take(self, arrays: Mapping[TrafficKind, Sequence[Any]]) -> CountedTraffic:
        kinds = {_address(array): kind for kind, listed in arrays.items() for array in listed}
        constants = {allocation.start for allocation in self._device.arena.allocations if allocation.read_only}
        counted = sum((_of_launch(launch, kinds, constants) for launch in self._device.launches), CountedTraffic())
        self._device.forget_launches()
        return counted

    def stop(self) -> None:
        self._device.count(False)


def _of_launch(launch: LaunchCounters, kinds: Mapping[int, TrafficKind], constants: set[int]) -> CountedTraffic:
    dram, l2, lanes = (dict.fromkeys(TrafficKind, 0) for _ in range(3))
    for array in launch.arrays.values():
        if array.address in constants:
            continue
        kind = kinds.get(array.address, TrafficKind.SCRATCH)
        dram[kind] += array.first_bytes_read + array.first_bytes_written
        l2[kind] += SECTOR_BYTES * _sum(array, "sectors")
        lanes[kind] += _sum(array, "bytes")
    return CountedTraffic(
        num_launches=1,
        dram=_kind_bytes(dram),
        l2=_kind_bytes(l2),
        lanes=_kind_bytes(lanes),
        shared_bytes=launch.shared_access_bytes,
        shared_wavefronts=launch.shared_wavefronts,
        shared_wavefronts_ideal=launch.shared_wavefronts_ideal,
        warp_instructions=launch.warp_instructions,
        lane_instructions=launch.lane_instructions,
    )


def _address(array: Any) -> int:
    """Where the array's allocation starts."""
    assert isinstance(array, CudaArray)
    assert isinstance(array.on_device, PtxArray)
    return array.on_device.allocation.start


def _sum(array: ArrayCounters, what: str) -> int:
    return sum(getattr(traffic, what) for traffic in (array.load, array.store, array.atomic))


def _kind_bytes(by_kind: Mapping[TrafficKind, int]) -> KindBytes:
    return KindBytes(**{kind.value: nbytes for kind, nbytes in by_kind.items()})
