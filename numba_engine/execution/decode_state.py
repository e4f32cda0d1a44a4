"""DecodeState: what a decode step needs to know of its sequences, kept where the step runs.

From step to step it moves on there by itself (``ReplayBackend.advance``). The host writes only what it alone knows: a
block that a sequence grew by, and everything when the sequences are others than last time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from numba_engine.backends.base import Array, Batch, SamplingBatch
from numba_engine.backends.replay import ReplayBackend
from numba_engine.scheduling.sequence import Sequence


class DecodeState:
    """One row a sequence. A step of S rows uses the first S; those beyond its sequences are padding, with no context.

    Between steps a row holds the token that was drawn last (``drawn``) and counts what is in the cache, without it.
    """

    def __init__(self, backend: ReplayBackend, max_rows: int, max_blocks: int, block_size: int) -> None:
        def filled(value: float, dtype: type[np.generic], *shape: int) -> Array:
            return backend.upload(np.full(shape or (max_rows,), value, dtype))

        self._backend = backend
        self._block_size = block_size
        self.drawn = filled(0, np.int32)
        self._output_index = filled(0, np.uint32)
        self._token_ids = filled(0, np.int32)
        self._positions = filled(0, np.int32)
        self._slot_mapping = filled(-1, np.int32)
        self._cu_seqlens_q = filled(0, np.int32, max_rows + 1)
        self._context_lens = filled(0, np.int32)
        self._block_tables = filled(0, np.int32, max_rows, max_blocks)
        self._logit_rows = backend.upload(np.arange(max_rows, dtype=np.int32))
        self._temperature = filled(0, np.float32)
        self._top_k = filled(0, np.int32)
        self._top_p = filled(1, np.float32)
        self._min_p = filled(0, np.float32)
        self._seed = filled(0, np.uint64)
        self._neutral = filled(0, np.float32)  # of what a draw does not look at
        self._no_offsets = filled(0, np.int32, max_rows + 1)
        self._no_integers, self._no_floats = filled(0, np.int32, 0), filled(0, np.float32, 0)

        self._sequences: list[Sequence] = []
        self._num_rows = 0
        self._lens: list[int] = []
        """Of each sequence, tokens in the cache after the steps so far: context_lens on the host."""
        self._tables = np.zeros((max_rows, max_blocks), np.int32)
        self._table_lens: list[int] = []

    @property
    def max_context_len(self) -> int:
        """The longest context of the next step."""
        return max(self._lens, default=0) + 1

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

    def batch(self, num_rows: int, max_context_len: int) -> Batch:
        """The first rows as a batch whose contexts are at most so long."""
        return Batch(
            token_ids=self._token_ids[:num_rows],
            positions=self._positions[:num_rows],
            slot_mapping=self._slot_mapping[:num_rows],
            cu_seqlens_q=self._cu_seqlens_q[: num_rows + 1],
            context_lens=self._context_lens[:num_rows],
            block_tables=self._block_tables[:num_rows],
            logit_rows=self._logit_rows[:num_rows],
            num_tokens=num_rows,
            num_seqs=num_rows,
            num_logits=num_rows,
            max_query_len=1,
            max_context_len=max_context_len,
        )

    def sampling(self, num_rows: int) -> SamplingBatch:
        neutral, no_offsets = self._neutral[:num_rows], self._no_offsets[: num_rows + 1]
        return SamplingBatch(
            temperature=self._temperature[:num_rows],
            top_k=self._top_k[:num_rows],
            top_p=self._top_p[:num_rows],
            min_p=self._min_p[:num_rows],
            repetition_penalty=neutral,
            presence_penalty=neutral,
            frequency_penalty=neutral,
            seed=self._seed[:num_rows],
            output_index=self._output_index[:num_rows],
            history_offsets=no_offsets,
            history=self._no_integers,
            history_prompt_lens=no_offsets[:num_rows],
            bias_offsets=no_offsets,
            bias_token_ids=self._no_integers,
            bias_values=self._no_floats,
            num_logits=num_rows,
            num_top_logprobs=-1,
        )

    def _is_at(self, sequences: list[Sequence]) -> bool:
        """They are the same, and every step they took was one of this state; so they have their blocks, too."""
        return sequences == self._sequences and self._lens == [s.num_computed_tokens for s in sequences]

    def _write(self, sequences: list[Sequence], num_rows: int) -> None:
        self._sequences, self._num_rows = sequences, num_rows
        self._lens = [sequence.num_computed_tokens for sequence in sequences]
        self._table_lens = [0] * len(sequences)
        for row, sequence in enumerate(sequences):
            self._set_table(row, sequence)
        num_seqs, params = len(sequences), [sequence.params for sequence in sequences]
        self._backend.write(self._block_tables[:num_rows], self._tables[:num_rows])
        self._backend.write(
            self._cu_seqlens_q[: num_rows + 1], np.minimum(np.arange(num_rows + 1, dtype=np.int32), num_seqs)
        )
        self._write_column(self._slot_mapping, [], np.int32, padding=-1)
        self._write_column(self._context_lens, self._lens, np.int32)
        self._write_column(self.drawn, [sequence.token_ids[-1] for sequence in sequences], np.int32)
        self._write_column(self._output_index, [sequence.num_output_tokens - 1 for sequence in sequences], np.uint32)
        self._write_column(self._temperature, [p.temperature for p in params], np.float32)
        self._write_column(self._top_k, [p.top_k for p in params], np.int32)
        self._write_column(self._top_p, [p.top_p for p in params], np.float32, padding=1)
        self._write_column(self._min_p, [p.min_p for p in params], np.float32)
        self._write_column(self._seed, [sequence.seed for sequence in sequences], np.uint64)

    def _write_column(self, array: Array, values: Seq[float], dtype: type[np.generic], *, padding: float = 0) -> None:
        column = np.full(self._num_rows, padding, dtype)
        column[: len(values)] = values
        self._backend.write(array[: self._num_rows], column)

    def _set_table(self, row: int, sequence: Sequence) -> None:
        table = sequence.block_table
        self._tables[row, : len(table)] = table
        self._table_lens[row] = len(table)
