"""When refused clients are told to come again: one after the other, as places get free, and never all at once."""

from __future__ import annotations

import random
import time

_MAX_DELAY_S = 60.0
_JITTER = 0.5


class RetryHints:
    """Gives each refusal the next moment at which there may be a place. One for each thing that can be full."""

    def __init__(self) -> None:
        self._last_given = 0.0
        """The moment that the last refused one was given."""

    def delay_s(self, place_s: float) -> float:
        """Seconds the client should wait, ``place_s`` being the time in which a place gets free."""
        now = time.monotonic()
        self._last_given = min(max(self._last_given, now) + place_s, now + max(place_s, _MAX_DELAY_S))
        return (self._last_given - now) * random.uniform(1.0, 1.0 + _JITTER)
