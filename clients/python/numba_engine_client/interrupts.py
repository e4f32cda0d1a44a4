"""Ctrl-C while a stream is read."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

from numba_engine_client.errors import InferenceError


@contextlib.contextmanager
def first_interrupt(stop: Callable[[], object]) -> Iterator[threading.Event]:
    """A first Ctrl-C calls ``stop``, beside what runs, and sets the event; another one is as ever. For the main thread.

    KeyboardInterrupt comes wherever the thread happens to be, and in the middle of gRPC it gets lost now and then.
    """
    interrupt = threading.Event()

    def stop_quietly() -> None:
        with contextlib.suppress(InferenceError):
            stop()

    def on_interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, before)
        interrupt.set()
        threading.Thread(target=stop_quietly, daemon=True).start()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
