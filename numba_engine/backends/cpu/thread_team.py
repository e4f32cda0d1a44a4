"""A team of threads that runs one parallel loop after another, with microseconds between them.

A loop is a kernel over items 0 … n. Every thread, the caller included, takes the next piece of what is left by
compare-and-swap until nothing is left, so a thread that the system has put aside holds up only the piece it is in, and
a team whose threads never wake still finishes. Waiting threads spin for some tens of microseconds, then offer their
core, then sleep in the kernel. numba's own thread pools are no choice here: ``workqueue`` aborts when two Python
threads use it at once, the others need system libraries, and each loop would cost several times as much.

A thread that waits also asks for the memory that it will likely read next (``announce``), so that memory does not rest
while a job ends and the caller prepares the next one. Decoding one token has 150 such gaps of some microseconds; using
them took 3 to 6 % off SmolLM2-135M's layers.

The state is one int64 array that launchers get as ``team``: job arguments at ARGS, the rest is private to this file.
"""

from __future__ import annotations

import math
import os
import threading
import weakref

import numpy as np

from numba_engine.backends.cpu.compilation import inner, launcher
from numba_engine.backends.cpu.intrinsics import (
    atomic_add,
    atomic_load,
    atomic_store,
    call_kernel,
    compare_and_swap,
    load_i64,
    pause,
    prefetch_l2,
    wait_while_equal,
    wake_all,
    yield_core,
)
from numba_engine.backends.cpu.limits import cpu_quota

# Words of the state; those that different threads write lie 128 bytes apart.
_LEFT = 0  # epoch << 32 | items not yet taken
_DONE = 16  # items finished
_SLEEPERS = 32
_STOP = 33
_FUNCTION, _NUM_ITEMS, _MIN_PIECE = 48, 49, 50
NUM_THREADS = 51
_AHEAD, _AHEAD_BYTES = 52, 53  # what the job after this one reads
ARGS = 64
STATE_WORDS = ARGS + 64
_COUNT_MASK = 0xFFFFFFFF

_SPINS = 2000  # about 30 µs of pauses
_YIELDS = 100
_PREFETCH_STEP = 256
_MOST_AHEAD = 1 << 18  # bytes: a quarter of a typical L2
_prefetch = prefetch_l2(_PREFETCH_STEP)


class ThreadTeam:
    """``num_threads`` threads, the caller's one of them. The others end with this object."""

    def __init__(self, num_threads: int) -> None:
        assert num_threads >= 1
        self.num_threads = num_threads
        buffer = np.zeros(STATE_WORDS + 16, dtype=np.int64)
        skip = (-buffer.ctypes.data % 128) // 8
        self.state = buffer[skip : skip + STATE_WORDS]
        self.state[NUM_THREADS] = num_threads
        self.address: int = self.state.ctypes.data
        for i in range(1, num_threads):
            threading.Thread(target=_work, args=(self.state, i), name=f"numba-engine-cpu-{i}", daemon=True).start()
        weakref.finalize(self, _stop, self.state)


def usable_cores() -> int:
    """Cores this process may use: its affinity, and the CPU quota of its container where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, min(cores, math.ceil(quota))) if quota else cores


@inner
def run(team: np.ndarray, function: int, num_items: int, min_piece: int) -> None:
    """Call ``function(begin, end, args)`` over all items, in pieces of at least ``min_piece`` where that many are left.

    For compiled callers. Returns when every item is done.
    """
    state = team.ctypes.data
    args = state + 8 * ARGS
    if num_items <= 0:
        return
    if num_items <= min_piece or team[NUM_THREADS] == 1:
        call_kernel(function, 0, num_items, args)
        return
    team[_FUNCTION] = function
    team[_NUM_ITEMS] = num_items
    team[_MIN_PIECE] = min_piece
    atomic_store(state + 8 * _DONE, 0)
    epoch = (atomic_load(state + 8 * _LEFT) >> 32) + 1
    atomic_store(state + 8 * _LEFT, ((epoch & 0x7FFFFFFF) << 32) | num_items)
    if atomic_load(state + 8 * _SLEEPERS) > 0:
        wake_all(state + 8 * _LEFT + 4)
    while _take_piece(state):
        pass
    spins = 0
    while atomic_load(state + 8 * _DONE) < num_items:
        spins += 1
        if spins < _SPINS:
            pause(0)
        else:
            yield_core(0)


@inner
def _take_piece(state: int) -> bool:
    """Do one piece of the current job; False if nothing is left to take."""
    left = atomic_load(state + 8 * _LEFT)
    count = left & _COUNT_MASK
    if count == 0:
        return False
    # Guided: large pieces first, so few of them; small ones last, so that all threads end together.
    size = max(load_i64(state, _MIN_PIECE), count * 4 // (5 * load_i64(state, NUM_THREADS)))
    size = min(size, count)
    if compare_and_swap(state + 8 * _LEFT, left, left - size) == 0:
        return True
    # From here to the count below, this job cannot end, so what it is may be read safely.
    begin = load_i64(state, _NUM_ITEMS) - count
    call_kernel(load_i64(state, _FUNCTION), begin, begin + size, state + 8 * ARGS)
    atomic_add(state + 8 * _DONE, size)
    return True


@inner
def announce(team: np.ndarray, address: int, nbytes: int) -> None:
    """The job after the next one will read memory there in the order of its items. Any address is allowed."""
    team[_AHEAD] = address
    team[_AHEAD_BYTES] = nbytes


@launcher
def _work(team: np.ndarray, index: int) -> None:
    state = team.ctypes.data
    idle = 0
    ahead, at, end = 0, 0, 0
    while True:
        if _take_piece(state):
            idle = 0
            continue
        idle += 1
        if load_i64(state, _AHEAD) != ahead:
            ahead, nbytes = load_i64(state, _AHEAD), load_i64(state, _AHEAD_BYTES)
            at, end = _own_part(ahead, nbytes, index, load_i64(state, NUM_THREADS))
        if at < end:
            _prefetch(at)
            at += _PREFETCH_STEP
        elif idle < _SPINS:
            pause(0)
        elif idle < _SPINS + _YIELDS:
            yield_core(0)
        else:
            if atomic_load(state + 8 * _STOP) != 0:
                return
            atomic_add(state + 8 * _SLEEPERS, 1)
            left = atomic_load(state + 8 * _LEFT)
            if left & _COUNT_MASK == 0 and atomic_load(state + 8 * _STOP) == 0:
                wait_while_equal(state + 8 * _LEFT + 4, left >> 32)
            atomic_add(state + 8 * _SLEEPERS, -1)
            idle = 0


@inner
def _own_part(address: int, nbytes: int, index: int, num_threads: int) -> tuple[int, int]:
    """Where the piece begins and ends that a thread will take if all take theirs in the order of their index."""
    left, size = nbytes, 0
    for _ in range(index + 1):
        left -= size
        size = left * 4 // (5 * num_threads)
    begin = address + nbytes - left
    return begin, begin + min(size, _MOST_AHEAD)


@launcher
def _stop(team: np.ndarray) -> None:
    state = team.ctypes.data
    atomic_store(state + 8 * _STOP, 1)
    left = atomic_load(state + 8 * _LEFT)
    atomic_store(state + 8 * _LEFT, left + (1 << 32))
    wake_all(state + 8 * _LEFT + 4)
