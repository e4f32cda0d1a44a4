"""Times of work on a GPU, and results that a timeout does not lose."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.cuda.kernels import read_bandwidth
from perf.machine import describe
from perf.random_model import clear


def seconds_of(backend: CudaBackend, calls: Sequence[Callable[[], None]], *, rounds: int = 5) -> float:
    """Seconds of one call, the median over rounds of all calls one after the other.

    By the GPU's clock between two events, as one replay, so that the host's launches are not in it. On the executor
    by the host's clock, which means nothing.
    """
    for call in calls:  # compiles, loads and warms up
        call()
    with backend.capture() as graph:
        for call in calls:
            call()
    run = graph.replay
    if backend.name != "ptx":
        run()
        backend.synchronize()
    rounds = 1 if backend.name == "ptx" else rounds
    return median(_elapsed(backend, run) for _ in range(rounds)) / len(calls)


def plain_read_gbps(backend: CudaBackend, nbytes: int) -> float:
    """Of memory that should be larger than any cache, timed as everything else is: the limit."""
    data = backend.empty((nbytes // 4,), np.dtype(np.uint32))
    clear(backend, data)
    seconds = seconds_of(backend, [partial(read_bandwidth.launch, backend, data)])
    return nbytes / seconds / 1e9


def _elapsed(backend: CudaBackend, run: Callable[[], None]) -> float:
    if backend.name == "ptx":
        start = time.perf_counter()
        run()
        backend.synchronize()
        return time.perf_counter() - start
    import cupy

    stream = backend.device.stream
    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    first.record(stream)
    run()
    last.record(stream)
    last.synchronize()
    return float(cupy.cuda.get_elapsed_time(first, last)) / 1e3


class Report:
    """A JSON file that is whole after every result: machine, versions, commit, GPU, and a list."""

    def __init__(self, path: Path | None, **facts: Any) -> None:
        self._path = path
        self.report = describe() | facts
        self.results: list[dict[str, Any]] = []
        self.report["results"] = self.results

    def add(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        if self._path is not None:
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps(self.report, indent=1) + "\n")
            partial.replace(self._path)


class Deadline:
    """Of a whole script: what is most important comes first, and what no longer fits is named, not started."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.left_out: list[str] = []

    def allows(self, what: str) -> bool:
        if time.monotonic() < self._end:
            return True
        self.left_out.append(what)
        return False
