"""Trying again when the server is full or not there."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from numba_engine_client.errors import InferenceError, OverloadedError, UnavailableError


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a call is made again that the server had no place for, or that found no server.

    Waits as long as the server's RetryInfo says, or ``first_s`` where none could say, and twice as long after each
    further attempt. A server that is there and full without a RetryInfo, such as of a message that is too large, would
    refuse again. A jitter of up to a quarter keeps clients from coming back together. A stream that has begun is never
    repeated.
    """

    attempts: int = 5
    """Calls in all."""
    first_s: float = 0.2
    longest_s: float = 30.0

    def delay_s(self, error: InferenceError, attempt: int) -> float | None:
        """Seconds until the call after this ``attempt`` (counted from 1); None when it is the last."""
        asked_s = error.retry_delay_s
        if isinstance(error, UnavailableError) and asked_s is None:
            asked_s = self.first_s
        if not isinstance(error, OverloadedError | UnavailableError) or asked_s is None or attempt >= self.attempts:
            return None
        return min(asked_s * 2 ** (attempt - 1), self.longest_s) * random.uniform(1.0, 1.25)


NO_RETRY = Retry(attempts=1)


class Timer:
    """The deadline of one call, over all its attempts."""

    def __init__(self, timeout: float | None, retry: Retry = NO_RETRY) -> None:
        self._ends_at = None if timeout is None else time.monotonic() + timeout
        self._retry = retry
        self._attempt = 1

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline, 0 when it is over; None where there is none."""
        return None if self._ends_at is None else max(self._ends_at - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0

    def next_delay_s(self, error: InferenceError) -> float:
        """Seconds until another attempt; raises the error where there is none left, or no time for it."""
        delay_s = self._retry.delay_s(error, self._attempt)
        left_s = self.left_s
        if delay_s is None or (left_s is not None and delay_s >= left_s):
            raise error
        self._attempt += 1
        return delay_s
