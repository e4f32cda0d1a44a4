"""ReplayBackend: a backend that works beside the host, which can note a run of its ops and have it done again as one.

What the ops of a recording read and write lies in arrays, so nothing but their contents differs from one run to the
next: a decode step's tokens, positions and lengths move on in the backend's own memory (``advance``), and the host
reads the tokens when it likes (``download_later``).
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from numba_engine.backends.arrays import Array, Batch
from numba_engine.backends.base import Backend


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


@dataclass(frozen=True, slots=True, eq=False)
class DecodeSampling:
    """``SamplingBatch`` that ``advance`` moves on: row r's history begins at history[history_begins[r]] and ends before
    history[history_ends[r]], with room for what is to come; its biases likewise."""

    temperature: Array  # [L] float32
    top_k: Array  # [L] int32
    top_p: Array  # [L] float32
    min_p: Array  # [L] float32
    repetition_penalty: Array  # [L] float32
    presence_penalty: Array  # [L] float32
    frequency_penalty: Array  # [L] float32
    seed: Array  # [L] uint64
    output_index: Array  # [L] uint32
    history_begins: Array  # [L] int32
    history_ends: Array  # [L] int32
    history: Array  # [*] int32
    history_prompt_lens: Array  # [L] int32
    bias_begins: Array  # [L] int32
    bias_ends: Array  # [L] int32
    bias_token_ids: Array  # [*] int32
    bias_values: Array  # [*] float32
    changes_logits: bool
    """Some row has a history or biases."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """``Sampled``, in the backend's memory; the last three are None where nobody wants log-probabilities."""

    token_ids: Array  # [L] int32
    logprobs: Array | None  # [L] float32
    top_token_ids: Array | None  # [L, n] int32
    top_logprobs: Array | None  # [L, n] float32


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
    def draw(self, drawn: Drawn, logits: Array, sampling: DecodeSampling) -> None:
        """``sample``, with its results left in the backend's memory."""

    @abstractmethod
    def advance(self, batch: Batch, sampling: DecodeSampling, token_ids: Array, block_size: int) -> None:
        """Move a batch of one token a sequence on to the tokens drawn, token_ids [S] int32: they become the batch's;
        positions, context_lens and output_index go up by one; slot_mapping follows from the block tables; histories
        that are not empty grow by the token.

        Rows with a context_len of 0 are padding and stay as they are.
        """
