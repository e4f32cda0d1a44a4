"""Memory of a backend, and the values made of it that ops take: weights, norms, the KV cache, a step's batch.

Symbols in shapes: T tokens of the step, S sequences of the step, H heads, KV key-value heads, D head_dim, B KV blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from numba_engine.formats import Format


class Array(Protocol):
    """Memory of a backend: a NumPy array on ``cpu``, a device array on ``cuda`` and ``ptx``."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> Array: ...


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Consecutive rows of a weight that share one format. ``data`` is the backend's own layout."""

    format: Format
    num_rows: int
    nbytes: int
    """Bytes streamed to read it once; equals the checkpoint's bytes unless the backend pads."""
    data: Any
    looked_up_row_bytes: int | None = None
    """Bytes read to look up one row; None where that is its share of nbytes. More where rows lie interleaved."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A matrix ``[out_features, in_features]`` as a backend keeps it: one segment per run of equal format.

    Stacked projections (q, k, v; gate, up) are one Weight whose rows are the parts one after the other.
    """

    name: str
    shape: tuple[int, int]
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    @property
    def looked_up_row_bytes(self) -> int:
        """Bytes read to look up one row, of a weight of one segment."""
        (segment,) = self.segments
        return segment.looked_up_row_bytes or segment.nbytes // segment.num_rows


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """What RMSNorm (Zhang & Sennrich 2019) multiplies with, float32 ``[N]``, and what it adds to the mean square."""

    weight: Array
    eps: float

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """cos and sin of every position's rotation, float32 ``[max_model_len, D / 2]`` (Su et al. 2021).

    Dimension i of a head pairs with i + D/2 ("rotate half", the Hugging Face order).
    """

    cos: Array
    sin: Array


@dataclass(frozen=True, slots=True, eq=False)
class KVCacheLayer:
    """Keys and values of one layer: ``[B, KV, block_size, D]`` each."""

    k: Array
    v: Array


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The arrays of one step: S sequences, each with a run of new tokens, laid end to end as T rows."""

    token_ids: Array  # [T] int32
    positions: Array  # [T] int32
    slot_mapping: Array  # [T] int32: block * block_size + offset, where the token's k and v go
    cu_seqlens_q: Array  # [S + 1] int32: sequence s owns rows cu_seqlens_q[s] … cu_seqlens_q[s + 1]
    context_lens: Array  # [S] int32: tokens the sequence has in the cache after this step, new ones included
    block_tables: Array  # [S, max_blocks] int32: the sequence's KV blocks in order, padded with 0
    logit_rows: Array  # [L] int32: rows whose logits are wanted, ascending
    num_tokens: int
    num_seqs: int
    num_logits: int
    max_query_len: int
    max_context_len: int
