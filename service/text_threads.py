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

MAX_SHORT_BYTES = 16 * 2**10
"""A request up to this size is done in milliseconds."""
# Smaller texts go first, but none waits for ever: one is overtaken only by what came within this time after it.
_OVERTAKEN_S_PER_BYTE = 1 / 2**8
_LOWEST_PRIORITY = 19
_ARRIVALS = itertools.count()


class TextThreads:
    """Two threads, one for short texts and one for long ones. Belongs to the event loop.

    The long ones run at the lowest priority, so that they take what the engine leaves of the cores.
    """

    def __init__(self, *, max_long_bytes: int) -> None:
        """
        Args:
            max_long_bytes: Of requests in and before the thread for long texts; one more is refused.
        """
        self._short = _Lane("short-texts", background=False)
        self._long = _Lane("long-texts", background=True)
        self._max_long_bytes = max_long_bytes
        self._long_bytes = 0

    @property
    def is_busy(self) -> bool:
        """A thread runs something, though its caller may be gone."""
        return self._short.is_busy or self._long.is_busy

    async def run(self, function: Callable[[], _Result], num_bytes: int) -> _Result:
        """The function's result; ``num_bytes`` is the size of what it works on. If cancelled in time, it never starts.

        Raises:
            TextsFullError: too much waits already.
        """
        if num_bytes <= MAX_SHORT_BYTES:
            return await asyncio.wrap_future(self._short.submit(function, num_bytes))
        if self._long_bytes and self._long_bytes + num_bytes > self._max_long_bytes:
            raise TextsFullError(self._long_bytes, self._max_long_bytes, self._long.s_per_byte * self._long_bytes)
        self._long_bytes += num_bytes
        try:
            return await asyncio.wrap_future(self._long.submit(function, num_bytes))
        finally:
            self._long_bytes -= num_bytes


class _Lane:
    """A thread and what waits for it. A daemon, since nothing can interrupt it and the process must be able to end."""

    def __init__(self, name: str, *, background: bool) -> None:
        self.is_busy = False
        self.s_per_byte = 1e-6
        """As of the last that was run."""
        self._waiting: queue.PriorityQueue[tuple[float, int, int, Callable[[], Any], Future[Any]]]
        self._waiting = queue.PriorityQueue()
        threading.Thread(target=self._main, args=(background,), name=name, daemon=True).start()

    def submit(self, function: Callable[[], _Result], num_bytes: int) -> Future[_Result]:
        future: Future[_Result] = Future()
        place = time.monotonic() + _OVERTAKEN_S_PER_BYTE * num_bytes
        self._waiting.put((place, next(_ARRIVALS), num_bytes, function, future))
        return future

    def _main(self, background: bool) -> None:
        if background and sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
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
