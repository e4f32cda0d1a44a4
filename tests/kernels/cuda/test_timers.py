"""Timers of the CUDA backend, over fakes of CuPy's events and of CUPTI's activity records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from numba_engine.backends.cuda.timers import CuptiTimer, EventTimer, op_timer
from numba_engine.backends.instruments import OpTime, TimeSource


class FakeGpu:
    """Each launch takes a microsecond more than the one before and leaves a gap of half a microsecond after it."""

    def __init__(self) -> None:
        self.num_launches = 0
        self.stream = object()
        self.now_ns = 5_000
        self.ran: list[tuple[int, int]] = []

    def launch(self) -> None:
        self.num_launches += 1
        start_ns = self.now_ns
        self.now_ns += 1_000 * self.num_launches
        self.ran.append((start_ns, self.now_ns))
        self.now_ns += 500

    def synchronize(self) -> None: ...


class FakeCuda:
    """``cupy.cuda``, as far as the timer uses it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.num_events = 0

    def Event(self) -> Any:
        self.num_events += 1
        event = SimpleNamespace(at_ns=None)

        def record(stream: object) -> None:
            assert stream is self._gpu.stream
            event.at_ns = self._gpu.now_ns

        event.record = record
        return event

    @staticmethod
    def get_elapsed_time(start: Any, end: Any) -> float:
        """Milliseconds."""
        return float((end.at_ns - start.at_ns) / 1e6)


@dataclass
class Record:
    kind: int
    start: int
    end: int
    graph_id: int = 0


class FakeCupti:
    """``cupti.cupti``: records come when they are flushed, newest buffer first, among those of other kinds."""

    ActivityKind = SimpleNamespace(CONCURRENT_KERNEL=10, MEMCPY=1)

    def __init__(self, gpu: FakeGpu, *, loses: int = 0) -> None:
        self._gpu, self._loses = gpu, loses
        self._sent = 0
        self.enabled: set[int] = set()
        self._completed: Callable[[Sequence[Record]], None] | None = None

    def activity_register_callbacks(
        self, requested: Callable[[], tuple[int, int]], completed: Callable[[Sequence[Record]], None]
    ) -> None:
        size, max_records = requested()
        assert size >= 1 << 20
        assert max_records == 0  # as many as fit
        self._completed = completed

    def activity_enable(self, kind: int) -> None:
        self.enabled.add(kind)
        self._sent = len(self._gpu.ran)

    def activity_disable(self, kind: int) -> None:
        self.enabled.remove(kind)

    def activity_flush_all(self, flag: int) -> None:
        assert self.enabled == {10}
        assert flag == 1
        assert self._completed is not None
        ran = self._gpu.ran[self._sent :]
        self._sent += len(ran)
        kernels = [Record(10, start, end) for start, end in ran][self._loses :]
        half = len(kernels) // 2
        self._completed([Record(1, 0, 9), *kernels[half:]])
        self._completed([*kernels[:half], Record(10, 1, 2, graph_id=7)])


def run_ops(timer: Any, gpu: FakeGpu, *launches: int) -> list[OpTime]:
    for count in launches:
        timer.begin()
        for _ in range(count):
            gpu.launch()
        timer.end()
    times: list[OpTime] = timer.take()
    return times


def seconds(*ns: int) -> tuple[float, ...]:
    return tuple(value / 1e9 for value in ns)


def test_cupti_gives_each_op_its_own_kernels() -> None:
    gpu = FakeGpu()
    timer = CuptiTimer(gpu, FakeCupti(gpu))
    gpu.launch()  # before: nobody's
    timer.start()
    gpu.launch()
    first, none, second = run_ops(timer, gpu, 2, 0, 1)
    assert timer.source is TimeSource.CUPTI
    assert (first.start_s, first.time_s) == pytest.approx(seconds(0, 3_000 + 500 + 4_000))
    assert (second.start_s, second.time_s) == pytest.approx(seconds(3_000 + 500 + 4_000 + 500, 5_000))
    assert [op.num_launches for op in (first, none, second)] == [2, 0, 1]
    assert none.time_s == 0
    (again,) = run_ops(timer, gpu, 1)
    assert (again.start_s, again.time_s) == pytest.approx(seconds(0, 6_000))


def test_lost_records_are_an_error_that_says_what_to_do() -> None:
    gpu = FakeGpu()
    timer = CuptiTimer(gpu, FakeCupti(gpu, loses=1))
    timer.start()
    with pytest.raises(RuntimeError, match=r"CUPTI recorded 2 of 3 kernels; uninstall cupti-python"):
        run_ops(timer, gpu, 1, 2)


def test_events_are_recorded_around_ops_and_used_again() -> None:
    gpu = FakeGpu()
    cuda = FakeCuda(gpu)
    timer = EventTimer(gpu, cuda)
    timer.start()
    for _ in range(3):
        first, second = run_ops(timer, gpu, 2, 1)
    assert timer.source is TimeSource.EVENTS
    assert cuda.num_events == 4
    # The launches 7 and 8 with the gap after each, then 9.
    assert (first.start_s, first.time_s, first.num_launches) == pytest.approx((*seconds(0, 7_500 + 8_500), 2))
    assert (second.start_s, second.time_s, second.num_launches) == pytest.approx((*seconds(16_000, 9_500), 1))


@pytest.mark.parametrize("trouble", [None, "not installed", "no rights"])
def test_events_stand_in_where_cupti_does_not_work(trouble: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    fake = FakeCupti(gpu)
    if trouble == "no rights":

        def activity_enable(kind: int) -> None:
            raise PermissionError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

        monkeypatch.setattr(fake, "activity_enable", activity_enable)
    installed: dict[str, Any] = {"cupy": ModuleType("cupy"), "cupy.cuda": FakeCuda(gpu)}
    installed |= {"cupti": ModuleType("cupti"), "cupti.cupti": None if trouble == "not installed" else fake}
    for name, module in installed.items():
        monkeypatch.setitem(sys.modules, name, module)
    timer = op_timer(gpu)
    assert timer.source is (TimeSource.EVENTS if trouble else TimeSource.CUPTI)
    assert not fake.enabled  # nothing is recorded until a profile starts
