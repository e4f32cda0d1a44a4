"""Says in the log, once, that compiled kernels cannot be kept, since each start then takes long."""

from __future__ import annotations

import logging
import threading

_first = threading.Semaphore(1)


def warn_not_kept(why: object) -> None:
    """Logs the first reason; further ones would say the same of each kernel."""
    if _first.acquire(blocking=False):
        logging.getLogger(__name__).warning(
            "compiled kernels cannot be kept, so every start compiles them again (%s); the cache folder needs to be"
            " writable, by its owner alone, with some MB free (XDG_CACHE_HOME moves it)",
            why,
        )
