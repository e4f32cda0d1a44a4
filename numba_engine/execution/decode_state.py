"""DecodeState: what a decode step needs to know of its sequences, kept where the step runs.

From step to step it advances there by itself (``CaptureBackend.advance``). The host writes only what it alone knows: a
block that a sequence grew by, and everything when the sequences are others than last time.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from numba_engine.backends.arrays import Array, Batch
from numba_engine.backends.capture import CaptureBackend
from numba_engine.backends.sampling import Sampled, Sampling
from numba_engine.execution.sampling import (
    FILTERS,
    PENALTIES,
    biases_of,
    changes_logits,
    columns_of,
    empty_sampled,
    num_top_logprobs,
)
from numba_engine.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from numba_engine.scheduling.sequence import Sequence

_TOP_LOGPROBS = (-1, 0, 5, MAX_LOGPROBS)
"""Numbers of likeliest tokens that steps are made for; -1 is no log-probabilities at all."""


@dataclass(frozen=True, slots=True)
class ForwardSize:
    """What forward passes differ in besides the contents of arrays."""

    num_rows: int
    max_context_len: int
    changes_logits: bool
    """There are histories, which grow by the tokens sampled last."""


@dataclass(frozen=True, slots=True)
class SampleSize:
    """What samplers differ in besides the contents of arrays."""

    num_rows: int
    changes_logits: bool
    num_top_logprobs: int


class DecodeState:
    """One row per sequence. A step of S rows uses the first S; those beyond its sequences are padding, with no context.

    Between steps a row holds the token that was sampled last and counts what is in the cache, without it.
    """

    def __init__(self, backend: CaptureBackend, max_rows: int, max_blocks: int, block_size: int) -> None:
        def zeros(dtype: type[np.generic], *shape: int) -> Array:
            return backend.upload(np.zeros(shape or (max_rows,), dtype))

        self._backend = backend
        self._block_size = block_size
        self._max_rows = max_rows
        self._max_len = max_blocks * block_size
        self._token_ids, self._positions, self._slot_mapping = zeros(np.int32), zeros(np.int32), zeros(np.int32)
        self._context_lens = zeros(np.int32)
        self._block_tables = zeros(np.int32, max_rows, max_blocks)
        self._logit_rows = backend.upload(np.arange(max_rows, dtype=np.int32))
        self._cu_seqlens_q = zeros(np.int32, max_rows + 1)
        self._parameters = {name: zeros(dtype) for name, dtype in {**FILTERS, **PENALTIES}.items()}
        self._seed, self._output_index = zeros(np.uint64), zeros(np.uint32)
        self._history_begins, self._history_ends, self._prompt_lens = zeros(np.int32), zeros(np.int32), zeros(np.int32)
        self._bias_begins, self._bias_ends = zeros(np.int32), zeros(np.int32)
        self._no_lists = zeros(np.int32, 0), zeros(np.int32, 0), zeros(np.float32, 0)
        self._no_bounds = zeros(np.int32)
        self._lists: tuple[Array, Array, Array] | None = None
        """History, and token ids and values of the biases, of all rows: large, and not often wanted."""
        self._sampled_ids = zeros(np.int32)
        self._sampled: dict[int, Sampled] = {}
        """By the number of likeliest tokens; their token ids are the same."""

        self._sequences: list[Sequence] = []
        self._num_rows = 0
        self._changes_logits = False
        self._num_top_logprobs = -1
        self._lens: list[int] = []
        """Of each sequence, tokens in the cache after the steps so far: context_lens on the host."""
        self._tables = np.zeros((max_rows, max_blocks), np.int32)
        self._table_lens: list[int] = []

    def prepare(self, sequences: list[Sequence], num_rows: int) -> None:
        """Be ready for a step of these sequences, each at its last token, padded to ``num_rows``."""
        if self._is_at(sequences) and num_rows == self._num_rows:
            self.extend_tables()
        else:
            self._write(sequences, num_rows)

    def extend_tables(self) -> None:
        """Be ready for one more step of the same sequences."""
        for row, (sequence, known) in enumerate(zip(self._sequences, self._table_lens, strict=True)):
            if len(sequence.block_table) > known:
                self._set_table(row, sequence)
                self._backend.write(self._block_tables[row : row + 1], self._tables[row : row + 1])

    def advance_host(self) -> None:
        """A step was launched: what the host knows of the rows follows."""
        self._lens = [length + 1 for length in self._lens]

    # ---- what a step takes -----------------------------------------------------------------------------------------

    @property
    def max_context_len(self) -> int:
        """Of the next step."""
        return max(self._lens, default=0) + 1

    def forward_size(self, max_context_len: int) -> ForwardSize:
        """Of the next step, made for contexts up to this long."""
        return ForwardSize(self._num_rows, max_context_len, self._changes_logits)

    @property
    def sample_size(self) -> SampleSize:
        """Of the next step."""
        return SampleSize(self._num_rows, self._changes_logits, self._num_top_logprobs)

    def batch(self, size: ForwardSize) -> Batch:
        n = size.num_rows
        return Batch(
            token_ids=self._token_ids[:n],
            positions=self._positions[:n],
            slot_mapping=self._slot_mapping[:n],
            cu_seqlens_q=self._cu_seqlens_q[: n + 1],
            context_lens=self._context_lens[:n],
            block_tables=self._block_tables[:n],
            logit_rows=self._logit_rows[:n],
            num_tokens=n,
            num_seqs=n,
            num_logits=n,
            max_query_len=1,
            max_context_len=size.max_context_len,
        )

    def sampling(self, size: ForwardSize | SampleSize) -> Sampling:
        n = size.num_rows
        if size.changes_logits:
            history, bias_token_ids, bias_values = self._room_for_lists()
            bounds = self._history_begins, self._history_ends, self._bias_begins, self._bias_ends
        else:  # nothing of what an earlier set of sequences left there
            history, bias_token_ids, bias_values = self._no_lists
            bounds = self._no_bounds, self._no_bounds, self._no_bounds, self._no_bounds
        history_begins, history_ends, bias_begins, bias_ends = (array[:n] for array in bounds)
        return Sampling(
            **{name: array[:n] for name, array in self._parameters.items()},
            seed=self._seed[:n],
            output_index=self._output_index[:n],
            history_begins=history_begins,
            history_ends=history_ends,
            history=history[: n * self._max_len],
            history_prompt_lens=self._prompt_lens[:n],
            bias_begins=bias_begins,
            bias_ends=bias_ends,
            bias_token_ids=bias_token_ids[: n * MAX_LOGIT_BIAS],
            bias_values=bias_values[: n * MAX_LOGIT_BIAS],
            changes_logits=size.changes_logits,
        )

    def token_ids(self, size: ForwardSize) -> Array:
        """Those sampled last."""
        return self._sampled_ids[: size.num_rows]

    def sampled(self, size: SampleSize) -> Sampled:
        n, num_top = size.num_rows, size.num_top_logprobs
        if num_top not in self._sampled:
            empty = empty_sampled(self._max_rows, num_top, self._backend)
            self._sampled[num_top] = replace(empty, token_ids=self._sampled_ids)
        whole = self._sampled[num_top]
        arrays = whole.token_ids, whole.logprobs, whole.top_token_ids, whole.top_logprobs
        token_ids, *logprobs = (None if array is None else array[:n] for array in arrays)
        assert token_ids is not None
        return Sampled(token_ids, *logprobs)

    # ---- what the host writes --------------------------------------------------------------------------------------

    def _is_at(self, sequences: list[Sequence]) -> bool:
        """They are the same, and every step they took was one of this state; so they have their blocks, too."""
        return sequences == self._sequences and self._lens == [s.num_computed_tokens for s in sequences]

    def _write(self, sequences: list[Sequence], num_rows: int) -> None:
        self._sequences, self._num_rows = sequences, num_rows
        self._lens = [sequence.num_computed_tokens for sequence in sequences]
        self._table_lens = [0] * len(sequences)
        for row, sequence in enumerate(sequences):
            self._set_table(row, sequence)
        self._backend.write(self._block_tables[:num_rows], self._tables[:num_rows])
        cu_seqlens_q = np.minimum(np.arange(num_rows + 1, dtype=np.int32), len(sequences))
        self._backend.write(self._cu_seqlens_q[: num_rows + 1], cu_seqlens_q)
        self._write_column(self._slot_mapping, [], np.int32, padding=-1)
        self._write_column(self._context_lens, self._lens, np.int32)
        self._write_column(self._sampled_ids, [s.token_ids[-1] for s in sequences], np.int32)
        self._write_column(self._output_index, [s.num_output_tokens - 1 for s in sequences], np.uint32)
        self._write_column(self._seed, [s.seed for s in sequences], np.uint64)
        self._write_sampling([sequence.params for sequence in sequences])

    def _write_sampling(self, params: list[SamplingParams]) -> None:
        wanted = num_top_logprobs(params)
        self._num_top_logprobs = next(n for n in _TOP_LOGPROBS if n >= wanted)
        self._changes_logits = changes_logits(params)
        self._write_parameters(params, FILTERS)
        if self._changes_logits:
            self._write_parameters(params, PENALTIES)
            self._write_histories()
            self._write_biases(params)

    def _write_parameters(self, params: list[SamplingParams], dtypes: Mapping[str, type[np.generic]]) -> None:
        for name, column in columns_of(params, dtypes).items():
            self._write_column(self._parameters[name], column, dtypes[name])

    def _write_histories(self) -> None:
        """Without the last token, which the step itself puts there. Rows whose penalties are neutral have none."""
        history, _, _ = self._room_for_lists()
        begins = [row * self._max_len for row in range(len(self._sequences))]
        ends = list(begins)
        for row, sequence in enumerate(self._sequences):
            if sequence.params.has_penalties:
                ends[row] += len(sequence) - 1
                tokens = np.array(sequence.token_ids[:-1], np.int32)
                self._backend.write(history[begins[row] : ends[row]], tokens)
        self._write_column(self._history_begins, begins, np.int32)
        self._write_column(self._history_ends, ends, np.int32)
        self._write_column(self._prompt_lens, [s.num_prompt_tokens for s in self._sequences], np.int32)

    def _write_biases(self, params: list[SamplingParams]) -> None:
        _, bias_token_ids, bias_values = self._room_for_lists()
        bounds, token_ids, values = biases_of(params)
        self._backend.write(bias_token_ids[: len(values)], token_ids)
        self._backend.write(bias_values[: len(values)], values)
        self._write_column(self._bias_begins, bounds[:-1], np.int32)
        self._write_column(self._bias_ends, bounds[1:], np.int32)

    def _room_for_lists(self) -> tuple[Array, Array, Array]:
        if self._lists is None:
            num_biases = self._max_rows * MAX_LOGIT_BIAS
            self._lists = (
                self._backend.empty((self._max_rows * self._max_len,), np.dtype(np.int32)),
                self._backend.empty((num_biases,), np.dtype(np.int32)),
                self._backend.empty((num_biases,), np.dtype(np.float32)),
            )
        return self._lists

    def _write_column(
        self, array: Array, values: Seq[float] | np.ndarray, dtype: type[np.generic], *, padding: float = 0
    ) -> None:
        column = np.full(self._num_rows, padding, dtype)
        column[: len(values)] = values
        self._backend.write(array[: self._num_rows], column)

    def _set_table(self, row: int, sequence: Sequence) -> None:
        table = sequence.block_table
        self._tables[row, : len(table)] = table
        self._table_lens[row] = len(table)
