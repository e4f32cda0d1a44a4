"""DecodeState: what a decode step needs to know of its sequences, kept where the step runs.

From step to step it moves on there by itself (``ReplayBackend.advance``). The host writes only what it alone knows: a
block that a sequence grew by, and everything when the sequences are others than last time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from numba_engine.backends.arrays import Array, Batch
from numba_engine.backends.replay import DecodeSampling, Drawn, ReplayBackend
from numba_engine.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from numba_engine.scheduling.sequence import Sequence

_TOP_LOGPROBS = (-1, 0, 5, MAX_LOGPROBS)
"""Numbers of likeliest tokens that steps are made for; -1 is no log-probabilities at all."""


@dataclass(frozen=True, slots=True)
class DecodeSize:
    """What steps differ in besides the contents of arrays."""

    num_rows: int
    max_context_len: int
    changes_logits: bool
    num_top_logprobs: int


class DecodeState:
    """One row a sequence. A step of S rows uses the first S; those beyond its sequences are padding, with no context.

    Between steps a row holds the token that was drawn last (``drawn``) and counts what is in the cache, without it.
    """

    def __init__(self, backend: ReplayBackend, max_rows: int, max_blocks: int, block_size: int) -> None:
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
        self._temperature, self._top_p, self._min_p = zeros(np.float32), zeros(np.float32), zeros(np.float32)
        self._top_k = zeros(np.int32)
        self._repetition, self._presence, self._frequency = zeros(np.float32), zeros(np.float32), zeros(np.float32)
        self._seed, self._output_index = zeros(np.uint64), zeros(np.uint32)
        self._history_begins, self._history_ends, self._prompt_lens = zeros(np.int32), zeros(np.int32), zeros(np.int32)
        self._bias_begins, self._bias_ends = zeros(np.int32), zeros(np.int32)
        self._no_lists = zeros(np.int32, 0), zeros(np.int32, 0), zeros(np.float32, 0)
        self._no_bounds = zeros(np.int32)
        self._lists: tuple[Array, Array, Array] | None = None
        """History, and token ids and values of the biases, of all rows: large, and not often wanted."""
        self._drawn_ids, self._drawn_logprobs = zeros(np.int32), zeros(np.float32)
        self._tops: dict[int, tuple[Array, Array]] = {}

        self._sequences: list[Sequence] = []
        self._num_rows = 0
        self._changes_logits = False
        self._num_top_logprobs = -1
        self._lens: list[int] = []
        """Of each sequence, tokens in the cache after the steps so far: context_lens on the host."""
        self._tables = np.zeros((max_rows, max_blocks), np.int32)
        self._table_lens: list[int] = []

    def hold(self, sequences: list[Sequence], num_rows: int) -> None:
        """Be ready for a step of these sequences, each at its last token, padded to so many rows."""
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

    def note_step(self) -> None:
        """A step was launched."""
        self._lens = [length + 1 for length in self._lens]

    # ---- what a step takes -----------------------------------------------------------------------------------------

    @property
    def size(self) -> DecodeSize:
        """Of the next step."""
        return DecodeSize(
            num_rows=self._num_rows,
            max_context_len=max(self._lens, default=0) + 1,
            changes_logits=self._changes_logits,
            num_top_logprobs=self._num_top_logprobs,
        )

    def batch(self, size: DecodeSize) -> Batch:
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

    def sampling(self, size: DecodeSize) -> DecodeSampling:
        n = size.num_rows
        if size.changes_logits:
            history, bias_token_ids, bias_values = self._room_for_lists()
            bounds = self._history_begins, self._history_ends, self._bias_begins, self._bias_ends
        else:  # nothing of what an earlier set of sequences left there
            history, bias_token_ids, bias_values = self._no_lists
            bounds = self._no_bounds, self._no_bounds, self._no_bounds, self._no_bounds
        history_begins, history_ends, bias_begins, bias_ends = (array[:n] for array in bounds)
        return DecodeSampling(
            temperature=self._temperature[:n],
            top_k=self._top_k[:n],
            top_p=self._top_p[:n],
            min_p=self._min_p[:n],
            repetition_penalty=self._repetition[:n],
            presence_penalty=self._presence[:n],
            frequency_penalty=self._frequency[:n],
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

    def drawn(self, size: DecodeSize) -> Drawn:
        n, num_top = size.num_rows, size.num_top_logprobs
        if num_top < 0:
            return Drawn(self._drawn_ids[:n], None, None, None)
        if num_top not in self._tops:
            shape, empty = (self._max_rows, num_top), self._backend.empty
            self._tops[num_top] = empty(shape, np.dtype(np.int32)), empty(shape, np.dtype(np.float32))
        top_token_ids, top_logprobs = self._tops[num_top]
        return Drawn(self._drawn_ids[:n], self._drawn_logprobs[:n], top_token_ids[:n], top_logprobs[:n])

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
        self._write_column(self._drawn_ids, [s.token_ids[-1] for s in sequences], np.int32)
        self._write_column(self._output_index, [s.num_output_tokens - 1 for s in sequences], np.uint32)
        self._write_column(self._seed, [s.seed for s in sequences], np.uint64)
        self._write_sampling([sequence.params for sequence in sequences])

    def _write_sampling(self, params: list[SamplingParams]) -> None:
        wanted = max((-1 if p.logprobs is None else p.logprobs for p in params), default=-1)
        self._num_top_logprobs = next(n for n in _TOP_LOGPROBS if n >= wanted)
        self._changes_logits = any(p.has_penalties or p.logit_bias for p in params)
        self._write_column(self._temperature, [p.temperature for p in params], np.float32)
        self._write_column(self._top_k, [p.top_k for p in params], np.int32)
        self._write_column(self._top_p, [p.top_p for p in params], np.float32)
        self._write_column(self._min_p, [p.min_p for p in params], np.float32)
        if self._changes_logits:
            self._write_histories(params)
            self._write_biases(params)

    def _write_histories(self, params: list[SamplingParams]) -> None:
        """Without the last token, which the step itself puts there. Rows whose penalties are neutral have none."""
        history, _, _ = self._room_for_lists()
        begins = [row * self._max_len for row in range(len(params))]
        ends = list(begins)
        for row, sequence in enumerate(self._sequences):
            if params[row].has_penalties:
                ends[row] += len(sequence) - 1
                tokens = np.array(sequence.token_ids[:-1], np.int32)
                self._backend.write(history[begins[row] : ends[row]], tokens)
        self._write_column(self._history_begins, begins, np.int32)
        self._write_column(self._history_ends, ends, np.int32)
        self._write_column(self._prompt_lens, [s.num_prompt_tokens for s in self._sequences], np.int32)
        self._write_column(self._repetition, [p.repetition_penalty for p in params], np.float32)
        self._write_column(self._presence, [p.presence_penalty for p in params], np.float32)
        self._write_column(self._frequency, [p.frequency_penalty for p in params], np.float32)

    def _write_biases(self, params: list[SamplingParams]) -> None:
        _, bias_token_ids, bias_values = self._room_for_lists()
        biases = [p.logit_bias for p in params]
        bounds = list(accumulate(map(len, biases), initial=0))
        token_ids = np.array([token_id for own in biases for token_id in own], np.int32)
        values = np.array([value for own in biases for value in own.values()], np.float32)
        self._backend.write(bias_token_ids[: bounds[-1]], token_ids)
        self._backend.write(bias_values[: bounds[-1]], values)
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

    def _write_column(self, array: Array, values: Seq[float], dtype: type[np.generic], *, padding: float = 0) -> None:
        column = np.full(self._num_rows, padding, dtype)
        column[: len(values)] = values
        self._backend.write(array[: self._num_rows], column)

    def _set_table(self, row: int, sequence: Sequence) -> None:
        table = sequence.block_table
        self._tables[row, : len(table)] = table
        self._table_lens[row] = len(table)
