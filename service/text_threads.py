"""Where texts are checked, tokenised and put together again: beside the event loop, and the short before the long."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from service.errors import TextsFullError

_Result = TypeVar("_Result")

# Up to how many bytes, and how nice to the engine: 4 KiB are done in milliseconds, 1 MiB takes seconds. The longer ones
# take what the engine leaves of the cores.
_LANES = ((2**12, 0), (2**16, 10), (2**63, 19))
# Smaller texts go first, but none waits for ever: one is overtaken only by what came within this time after it.
_OVERTAKEN_S_PER_BYTE = 1 / 2**8
_ARRIVALS = itertools.count()


class TextThreads:
    """A thread for short texts, one for longer ones and one for the longest. Belongs to the event loop."""

    def __init__(self, *, max_waiting_bytes: int) -> None:
        """
        Args:
            max_waiting_bytes: Of requests in and before one of the threads; one more is refused.
        """
        self._lanes = [_Lane(max_bytes, niceness) for max_bytes, niceness in _LANES]
        self._max_waiting_bytes = max_waiting_bytes

    @property
    def is_busy(self) -> bool:
        """A thread runs something, though its caller may be gone."""
        return any(lane.is_busy for lane in self._lanes)

    async def run(self, function: Callable[[], _Result], num_bytes: int) -> _Result:
        """The function's result; ``num_bytes`` is the size of what it works on. If cancelled in time, it never starts.

        Raises:
            TextsFullError: too much waits already.
        """
        lane = next(lane for lane in self._lanes if num_bytes <= lane.max_bytes)
        if lane.waiting_bytes and lane.waiting_bytes + num_bytes > self._max_waiting_bytes:
            wait_s = lane.s_per_byte * lane.waiting_bytes
            raise TextsFullError(lane.waiting_bytes, self._max_waiting_bytes, wait_s)
        lane.waiting_bytes += num_bytes
        try:
            return await asyncio.wrap_future(lane.submit(function, num_bytes))
        finally:
            lane.waiting_bytes -= num_bytes


class _Lane:
    """A thread and what waits for it. A daemon, since nothing can interrupt it and the process must be able to end."""

    def __init__(self, max_bytes: int, niceness: int) -> None:
        self.max_bytes = max_bytes
        self.waiting_bytes = 0
        """What is run included."""
        self.is_busy = False
        self.s_per_byte = 1e-6
        """As of the last that was run."""
        self._waiting: queue.PriorityQueue[tuple[float, int, int, Callable[[], Any], Future[Any]]]
        self._waiting = queue.PriorityQueue()
        threading.Thread(target=self._main, args=(niceness,), name="texts", daemon=True).start()

    def submit(self, function: Callable[[], _Result], num_bytes: int) -> Future[_Result]:
        future: Future[_Result] = Future()
        place = time.monotonic() + _OVERTAKEN_S_PER_BYTE * num_bytes
        self._waiting.put((place, next(_ARRIVALS), num_bytes, function, future))
        return future

    def _main(self, niceness: int) -> None:
        if niceness and sys.platform == "linux":  # where a thread has a priority of its own
            niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, 0))  # no thread may become less nice
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        while True:
            *_, num_bytes, function, future = self._waiting.get()
            if future.set_running_or_notify_cancel():
                self.is_busy = True
                start = time.monotonic()
                try:
                    result = function()
                except BaseException as error:  # whatever it is, its caller waits for it
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
                self.s_per_byte = (time.monotonic() - start) / max(num_bytes, 1)
                self.is_busy = False
            del function, future  # what waits next may come much later
