"""What a step's sampler takes of its sequences, and what the host gets of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from numba_engine.backends.arrays import Array
from numba_engine.backends.base import Backend
from numba_engine.backends.capture import CaptureBackend, Pending
from numba_engine.backends.sampling import Sampled, Sampling
from numba_engine.sampling_params import SamplingParams
from numba_engine.scheduling.sequence import Sequence

_Fetched = TypeVar("_Fetched")

FILTERS: Mapping[str, type[np.generic]] = MappingProxyType(
    {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
)
PENALTIES: Mapping[str, type[np.generic]] = MappingProxyType(
    {"repetition_penalty": np.float32, "presence_penalty": np.float32, "frequency_penalty": np.float32}
)
"""Parameters of one number per row, with the element types that ``Sampling`` has for them."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """``Sampled``, on the host."""

    token_ids: np.ndarray  # [L] int32
    logprobs: np.ndarray | None  # [L] float32
    top_token_ids: np.ndarray | None  # [L, n] int32
    top_logprobs: np.ndarray | None  # [L, n] float32


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """``SampledTokens`` on their way to the host."""

    arrays: tuple[Pending | None, ...]
    num_seqs: int

    def wait(self) -> SampledTokens:
        """Without what was sampled for padding."""
        token_ids, *logprobs = (None if array is None else array.wait()[: self.num_seqs] for array in self.arrays)
        assert token_ids is not None
        return SampledTokens(token_ids, *logprobs)


class SamplingBuilder:
    """Builds each step's sampling parameters. While the same sequences sample, most of them stay as they are."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._last: Sampling | None = None

    def build(self, sequences: list[Sequence], backend: Backend) -> Sampling:
        if self._last is None or sequences != self._sequences or any(s.params.has_penalties for s in sequences):
            self._last = build_sampling(sequences, backend)
            self._sequences = sequences
        else:
            self._last = replace(self._last, output_index=_output_index(sequences, backend))
        return self._last


def build_sampling(sequences: Seq[Sequence], backend: Backend) -> Sampling:
    """Parameters of the sequences whose next token is sampled, one row each."""
    upload, num_rows = backend.upload, len(sequences)
    params = [sequence.params for sequence in sequences]
    histories = [sequence.token_ids if sequence.params.has_penalties else [] for sequence in sequences]
    history_bounds = upload(bounds_of(histories))
    bias_bounds, bias_token_ids, bias_values = map(upload, biases_of(params))
    return Sampling(
        **{name: upload(column) for name, column in columns_of(params, {**FILTERS, **PENALTIES}).items()},
        seed=upload(np.array([sequence.seed for sequence in sequences], np.uint64)),
        output_index=_output_index(sequences, backend),
        history_begins=history_bounds[:num_rows],
        history_ends=history_bounds[1:],
        history=upload(np.array([token_id for history in histories for token_id in history], np.int32)),
        history_prompt_lens=upload(np.array([sequence.num_prompt_tokens for sequence in sequences], np.int32)),
        bias_begins=bias_bounds[:num_rows],
        bias_ends=bias_bounds[1:],
        bias_token_ids=bias_token_ids,
        bias_values=bias_values,
        changes_logits=changes_logits(params),
    )


def columns_of(params: Seq[SamplingParams], dtypes: Mapping[str, type[np.generic]]) -> dict[str, np.ndarray]:
    """The parameters of these names, [L] each."""
    return {name: np.array([getattr(p, name) for p in params], dtype) for name, dtype in dtypes.items()}


def biases_of(params: Seq[SamplingParams]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Biases of all rows end to end: bounds [L + 1] int32, token ids int32, values float32."""
    biases = [p.logit_bias for p in params]
    token_ids = np.array([token_id for own in biases for token_id in own], np.int32)
    return bounds_of(biases), token_ids, np.array([value for own in biases for value in own.values()], np.float32)


def bounds_of(lists: Iterable[Sized]) -> np.ndarray:
    """``[L + 1]`` int32: where each of the lists begins, and where it ends, if they lie end to end."""
    return np.array([*accumulate(map(len, lists), initial=0)], np.int32)


def changes_logits(params: Seq[SamplingParams]) -> bool:
    return any(p.has_penalties or p.logit_bias for p in params)


def num_top_logprobs(params: Seq[SamplingParams]) -> int:
    """The most likeliest tokens that any of them asks for; -1 where none wants log-probabilities."""
    return max((-1 if p.logprobs is None else p.logprobs for p in params), default=-1)


def empty_sampled(num_rows: int, num_top: int, backend: Backend) -> Sampled:
    """Memory for what is sampled. ``num_top`` -1: without log-probabilities."""

    def empty(dtype: type[np.generic], *shape: int) -> Array:
        return backend.empty((num_rows, *shape), np.dtype(dtype))

    if num_top < 0:
        return Sampled(empty(np.int32))
    return Sampled(empty(np.int32), empty(np.float32), empty(np.int32, num_top), empty(np.float32, num_top))


def download(sampled: Sampled, backend: Backend) -> SampledTokens:
    """Waits for it."""
    token_ids, *logprobs = _each(sampled, backend.download)
    assert token_ids is not None
    return SampledTokens(token_ids, *logprobs)


def download_later(sampled: Sampled, num_seqs: int, backend: CaptureBackend) -> PendingTokens:
    return PendingTokens(_each(sampled, backend.download_later), num_seqs)


def _each(sampled: Sampled, fetch: Callable[[Array], _Fetched]) -> tuple[_Fetched | None, ...]:
    arrays = sampled.token_ids, sampled.logprobs, sampled.top_token_ids, sampled.top_logprobs
    return tuple(None if array is None else fetch(array) for array in arrays)


def _output_index(sequences: Seq[Sequence], backend: Backend) -> Array:
    return backend.upload(np.array([sequence.num_output_tokens for sequence in sequences], np.uint32))
