"""CaptureBackend: a backend that can capture a run of its ops and replay it as one.

What captured ops read and write lies in arrays, so nothing but their contents differs from one replay to the next: a
decode step's tokens, positions and lengths advance in the backend's own memory (``advance``), and the host reads the
tokens when it likes (``download_later``).
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from numba_engine.backends.arrays import Array, Batch
from numba_engine.backends.base import Backend
from numba_engine.backends.sampling import Sampling


class Graph(Protocol):
    """Ops that were captured while they were called."""

    @property
    def num_launches(self) -> int:
        """Kernels that one replay runs."""
        ...

    def replay(self) -> None:
        """Run them once more, in order with everything else. Returns at once."""
        ...


class Pending(Protocol):
    """An array on its way to the host."""

    def wait(self) -> np.ndarray: ...


class CaptureBackend(Backend):
    """Ops are in order; all of them can be captured, but not copies and waiting."""

    is_asynchronous = True
    """Ops return before they are done, so that a step can be launched before the tokens of the last one are read."""
    rounds_sizes = True
    """A graph is dear to capture, and fits contexts up to some length: steps are rounded up to a few sizes, and padded
    with rows that have no context. Else each number of rows has a graph of its own, for contexts of any length."""

    @abstractmethod
    def capture(self) -> AbstractContextManager[Graph]:
        """Capture the ops called inside the block instead of running them.

        What they allocate in passing lives as long as the graph. Run them once before: what a first run compiles, loads
        or allocates for good cannot be captured.
        """

    @abstractmethod
    def write(self, array: Array, host: np.ndarray) -> None:
        """Overwrite the array, after the ops so far. The host array may be reused at once."""

    @abstractmethod
    def download_later(self, array: Array) -> Pending:
        """Start a download of what the ops so far leave in the array, and do not wait for it."""

    @abstractmethod
    def advance(self, batch: Batch, sampling: Sampling, token_ids: Array, block_size: int) -> None:
        """Advance a batch of one token per sequence to the tokens sampled, token_ids [S] int32: they become the
        batch's; positions, context_lens and output_index go up by one; slot_mapping follows from the block tables;
        histories that are not empty grow by the token, for which ``history`` must have room.

        Rows with a context_len of 0 are padding and stay as they are.
        """
