"""Times of ops as the GPU takes them: CUPTI's record of each kernel where its package works, else events around ops.

CUPTI says when a kernel ran and nothing else; two events have the launches between them as well, and come in steps of
half a microsecond. Neither makes the host wait between ops. Written against the documentation of CuPy and of
cupti-python (https://docs.nvidia.com/cupti-python); not yet measured on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from numba_engine.backends.instruments import OpTime, OpTimer, TimeSource

_BUFFER_BYTES = 8 << 20
_FLUSH_FORCED = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED: incomplete buffers too


class TimedDevice(Protocol):
    """What a timer asks of ``CudaDevice``."""

    num_launches: int
    """Single launches so far; those of replayed graphs are not among them."""
    stream: Any

    def synchronize(self) -> None: ...


def op_timer(device: TimedDevice) -> OpTimer:
    """The best that works here."""
    try:
        return CuptiTimer(device, importlib.import_module("cupti.cupti"))
    except Exception:  # not installed, or its library, the driver or the rights are not what it needs
        return EventTimer(device, importlib.import_module("cupy.cuda"))


class EventTimer:
    """An event before and one after each op. ``cuda`` is ``cupy.cuda``."""

    source = TimeSource.EVENTS

    def __init__(self, device: TimedDevice, cuda: Any) -> None:
        self._device, self._cuda = device, cuda
        self._spans: list[tuple[Any, Any, int]] = []
        """Events before and after each op, and its launches."""
        self._began: tuple[Any, int] | None = None
        self._spare: list[Any] = []

    def start(self) -> None:
        self._spans.clear()

    def begin(self) -> None:
        self._began = self._record(), self._device.num_launches

    def end(self) -> None:
        assert self._began is not None, "begin first"
        before, launches = self._began
        self._spans.append((before, self._record(), self._device.num_launches - launches))

    def take(self) -> list[OpTime]:
        self._device.synchronize()
        spans, self._spans = self._spans, []
        elapsed_s = lambda a, b: self._cuda.get_elapsed_time(a, b) / 1e3  # noqa: E731
        times = [OpTime(elapsed_s(spans[0][0], before), elapsed_s(before, after), n) for before, after, n in spans]
        self._spare += [event for before, after, _ in spans for event in (before, after)]
        return times

    def stop(self) -> None:
        self._spans.clear()
        self._spare.clear()

    def _record(self) -> Any:
        event = self._spare.pop() if self._spare else self._cuda.Event()
        event.record(self._device.stream)
        return event


class CuptiTimer:
    """Activity records of kernels. They come in the order of the one stream, so the launches of an op tell which are
    its own; kernels of replayed graphs carry the graph's id and are nobody's. ``cupti`` is ``cupti.cupti``.
    """

    source = TimeSource.CUPTI

    def __init__(self, device: TimedDevice, cupti: Any) -> None:
        self._device, self._cupti = device, cupti
        self._kernels: list[tuple[int, int]] = []
        """(start, end) of each launch since the last ``take``, in ns, as far as the records have come."""
        self._first_launch = 0
        self._ops: list[tuple[int, int]] = []
        """(first, last + 1) launch of each op, as ``num_launches`` counts them."""
        self._began_at = 0
        cupti.activity_register_callbacks(lambda: (_BUFFER_BYTES, 0), self._note)
        self.start()
        self.stop()  # here, so that what does not work is known before it is relied on

    def start(self) -> None:
        self._device.synchronize()
        self._cupti.activity_enable(self._cupti.ActivityKind.CONCURRENT_KERNEL)
        self._forget()

    def begin(self) -> None:
        self._began_at = self._device.num_launches

    def end(self) -> None:
        self._ops.append((self._began_at, self._device.num_launches))

    def take(self) -> list[OpTime]:
        """Raises RuntimeError where CUPTI lost records, as nothing could be told apart then."""
        self._device.synchronize()
        self._cupti.activity_flush_all(_FLUSH_FORCED)
        kernels, launched = sorted(self._kernels), self._device.num_launches - self._first_launch
        ops = [(first - self._first_launch, last - self._first_launch) for first, last in self._ops]
        self._forget()
        if len(kernels) != launched:
            raise RuntimeError(
                f"CUPTI recorded {len(kernels)} of {launched} kernels;"
                " uninstall cupti-python to profile with events instead"
            )
        first_ns = next((kernels[first][0] for first, last in ops if last > first), 0)
        return [_op_time(kernels[first:last], first_ns) for first, last in ops]

    def stop(self) -> None:
        self._cupti.activity_disable(self._cupti.ActivityKind.CONCURRENT_KERNEL)

    def _note(self, activities: Sequence[Any]) -> None:
        """Called by CUPTI with a buffer of records, which it reuses after."""
        kind = self._cupti.ActivityKind.CONCURRENT_KERNEL
        self._kernels += [(a.start, a.end) for a in activities if a.kind == kind and a.graph_id == 0]

    def _forget(self) -> None:
        self._kernels, self._ops = [], []
        self._first_launch = self._device.num_launches


def _op_time(kernels: Sequence[tuple[int, int]], first_ns: int) -> OpTime:
    """From the start of the op's first kernel to the end of its last; an op without kernels takes no time."""
    if not kernels:
        return OpTime(0.0, 0.0, 0)
    return OpTime((kernels[0][0] - first_ns) / 1e9, (kernels[-1][1] - kernels[0][0]) / 1e9, len(kernels))
