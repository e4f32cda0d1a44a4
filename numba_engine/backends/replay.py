"""ReplayBackend: a backend that works beside the host, which can note a run of its ops and have it done again as one.

What the ops of a recording read and write lies in arrays, so nothing but their contents differs from one run to the
next: a decode step's tokens, positions and lengths move on in the backend's own memory (``advance``), and the host
reads the tokens when it likes (``download_later``).
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from numba_engine.backends.base import Array, Backend, Batch, SamplingBatch


class Recording(Protocol):
    """Ops that were noted while they were called."""

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


class ReplayBackend(Backend):
    """Ops are asynchronous and in order; all but ``sample``, copies and waiting can be recorded."""

    @abstractmethod
    def record(self) -> AbstractContextManager[Recording]:
        """Note the ops called inside the block instead of running them.

        What they allocate in passing lives as long as the recording. Run them once before: what a first run compiles,
        loads or allocates for good cannot be recorded.
        """

    @abstractmethod
    def write(self, array: Array, host: np.ndarray) -> None:
        """Overwrite the array, after the ops so far. The host array may be reused at once."""

    @abstractmethod
    def download_later(self, array: Array) -> Pending:
        """Start a download of what the ops so far leave in the array, and do not wait for it."""

    @abstractmethod
    def draw(self, token_ids: Array, logits: Array, sampling: SamplingBatch) -> None:
        """The tokens of ``sample`` [L] int32, left in the backend's memory, for batches that want nothing but tokens:
        no penalties, no bias, no log-probabilities."""

    @abstractmethod
    def advance(self, batch: Batch, output_index: Array, drawn: Array, block_size: int) -> None:
        """Move a batch of one token a sequence on to the tokens drawn [S] int32: they become token_ids; positions,
        context_lens and output_index [S] go up by one; slot_mapping follows from the block tables.

        Rows with a context_len of 0 are padding and stay as they are.
        """
