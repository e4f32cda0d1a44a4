"""The thread team: every item exactly once, teams side by side, teams that go away, more threads than cores."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

from numba_engine.backends.cpu.compilation import kernel_address, launcher
from numba_engine.backends.cpu.intrinsics import atomic_add, load_i64
from numba_engine.backends.cpu.thread_team import ARGS, ThreadTeam, run, usable_cores


def count_items(begin: int, end: int, args: int) -> None:
    for item in range(begin, end):
        atomic_add(load_i64(args, 0) + 8 * item, 1)


@launcher
def run_counting(team: np.ndarray, kernel: int, counts: np.ndarray, min_piece: int, times: int) -> None:
    for _ in range(times):
        team[ARGS] = counts.ctypes.data
        run(team, kernel, counts.size, min_piece)


@pytest.fixture(scope="module")
def kernel() -> int:
    return kernel_address(count_items, "void(int64, int64, int64)")


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_every_item_once(kernel: int, num_threads: int) -> None:
    team = ThreadTeam(num_threads)
    for num_items in (0, 1, 2, 7, 100, 1000):
        for min_piece in (1, 3, 64):
            counts = np.zeros(num_items, dtype=np.int64)
            run_counting(team.state, kernel, counts, min_piece, 20)
            assert np.array_equal(counts, np.full(num_items, 20))


def test_teams_side_by_side_and_with_pauses(kernel: int) -> None:
    """Pauses let the helpers fall asleep, so that some jobs must wake them."""
    totals: dict[int, np.ndarray] = {}

    def use(name: int) -> None:
        team = ThreadTeam(3)
        totals[name] = np.zeros(500, dtype=np.int64)
        for i in range(50):
            run_counting(team.state, kernel, totals[name], 1, 10)
            if i % 5 == 0:
                time.sleep(0.002)

    threads = [threading.Thread(target=use, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(np.array_equal(total, np.full(500, 500)) for total in totals.values())
    assert len(totals) == 3


def test_threads_end_with_their_team(kernel: int) -> None:
    def helpers() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("numba-engine-cpu-")}

    before = helpers()
    team = ThreadTeam(3)
    run_counting(team.state, kernel, np.zeros(10, dtype=np.int64), 1, 1)
    new = helpers() - before
    assert len(new) == 2
    del team
    gc.collect()
    for thread in new:
        thread.join(10)
        assert not thread.is_alive()


def test_an_idle_team_sleeps(kernel: int) -> None:
    team = ThreadTeam(4)
    run_counting(team.state, kernel, np.zeros(100, dtype=np.int64), 1, 1)
    time.sleep(0.1)
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.1


def test_kernels_leave_the_interpreter_free(kernel: int) -> None:
    """Another Python thread runs while a launcher does."""
    team = ThreadTeam(2)
    counts = np.zeros(100_000, dtype=np.int64)
    run_counting(team.state, kernel, counts, 1000, 1)
    worker = threading.Thread(target=run_counting, args=(team.state, kernel, counts, 1000, 300))
    worker.start()
    seen_running = 0
    while worker.is_alive():
        seen_running += 1
        time.sleep(0.001)
    assert seen_running > 10


def test_usable_cores_is_a_sane_number() -> None:
    assert 1 <= usable_cores() <= 4096
