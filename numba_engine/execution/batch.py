"""The arrays of one step, built from what the scheduler decided."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate

import numpy as np

from numba_engine.backends.base import Array, Backend, Batch, SamplingBatch
from numba_engine.scheduling.scheduler import ScheduledSequence
from numba_engine.scheduling.sequence import Sequence


def build_batch(step: Seq[ScheduledSequence], block_size: int, backend: Backend) -> Batch:
    """Lay the new tokens of the step's sequences end to end.

    What there is one of per sequence is counted in lists: for the few of a step they are faster than arrays.
    """

    def int32(values: Seq[int] | np.ndarray) -> Array:
        return backend.upload(np.asarray(values, dtype=np.int32))

    query_lens = [scheduled.num_new_tokens for scheduled in step]
    context_lens = [scheduled.sequence.num_computed_tokens + scheduled.num_new_tokens for scheduled in step]
    cu_seqlens_q = list(accumulate(query_lens, initial=0))
    positions = np.concatenate(
        [np.arange(end - length, end) for end, length in zip(context_lens, query_lens, strict=True)]
    )
    block_tables = _block_tables([scheduled.sequence for scheduled in step], context_lens, block_size)
    sequence_of_row = np.repeat(np.arange(len(step)), query_lens)
    block, offset = np.divmod(positions, block_size)
    logit_rows = [end - 1 for end, scheduled in zip(cu_seqlens_q[1:], step, strict=True) if scheduled.wants_token]
    return Batch(
        token_ids=int32([token_id for scheduled in step for token_id in _new_token_ids(scheduled)]),
        positions=int32(positions),
        slot_mapping=int32(block_tables[sequence_of_row, block] * block_size + offset),
        cu_seqlens_q=int32(cu_seqlens_q),
        context_lens=int32(context_lens),
        block_tables=int32(block_tables),
        logit_rows=int32(logit_rows),
        num_tokens=cu_seqlens_q[-1],
        num_seqs=len(step),
        num_logits=len(logit_rows),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )


def _new_token_ids(scheduled: ScheduledSequence) -> list[int]:
    first = scheduled.sequence.num_computed_tokens
    return scheduled.sequence.token_ids[first : first + scheduled.num_new_tokens]


def _block_tables(sequences: Seq[Sequence], context_lens: Seq[int], block_size: int) -> np.ndarray:
    """``[S, max_blocks]``: only the blocks that hold this step's context, padded with 0."""
    num_blocks = [-(-length // block_size) for length in context_lens]
    tables = np.zeros((len(sequences), max(num_blocks)), dtype=np.int32)
    for row, sequence, count in zip(tables, sequences, num_blocks, strict=True):
        row[:count] = sequence.block_table[:count]
    return tables


class SamplingBatches:
    """Builds each step's sampling parameters. While the same sequences draw, most of them stay as they are."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._last: SamplingBatch | None = None

    def build(self, sequences: list[Sequence], backend: Backend) -> SamplingBatch:
        if self._last is None or sequences != self._sequences or any(s.params.has_penalties for s in sequences):
            self._last = build_sampling_batch(sequences, backend)
            self._sequences = sequences
        else:
            self._last = replace(self._last, output_index=_output_index(sequences, backend))
        return self._last


def build_sampling_batch(sequences: Seq[Sequence], backend: Backend) -> SamplingBatch:
    """Parameters of the sequences whose next token is drawn, one row each."""
    params = [sequence.params for sequence in sequences]

    def column(name: str, dtype: type[np.generic]) -> np.ndarray:
        return backend.upload(np.array([getattr(p, name) for p in params], dtype=dtype))  # type: ignore[return-value]

    histories = [sequence.token_ids if sequence.params.has_penalties else [] for sequence in sequences]
    return SamplingBatch(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        presence_penalty=column("presence_penalty", np.float32),
        frequency_penalty=column("frequency_penalty", np.float32),
        seed=backend.upload(np.array([sequence.seed for sequence in sequences], dtype=np.uint64)),
        output_index=_output_index(sequences, backend),
        history_offsets=backend.upload(_offsets(histories)),
        history=backend.upload(_concatenated(histories, np.int32)),
        history_prompt_lens=backend.upload(
            np.array([s.num_prompt_tokens if s.params.has_penalties else 0 for s in sequences], dtype=np.int32)
        ),
        bias_offsets=backend.upload(_offsets([p.logit_bias for p in params])),
        bias_token_ids=backend.upload(_concatenated([list(p.logit_bias) for p in params], np.int32)),
        bias_values=backend.upload(_concatenated([list(p.logit_bias.values()) for p in params], np.float32)),
        num_logits=len(sequences),
        num_top_logprobs=max(-1 if p.logprobs is None else p.logprobs for p in params),
    )


def _output_index(sequences: Seq[Sequence], backend: Backend) -> Array:
    return backend.upload(np.array([sequence.num_output_tokens for sequence in sequences], dtype=np.uint32))


def _offsets(lists: Iterable[Seq[int] | object]) -> np.ndarray:
    return np.array([*accumulate((len(values) for values in lists), initial=0)], dtype=np.int32)  # type: ignore[arg-type]


def _concatenated(lists: Iterable[Seq[float]], dtype: type[np.generic]) -> np.ndarray:
    return np.array([value for values in lists for value in values], dtype=dtype)
