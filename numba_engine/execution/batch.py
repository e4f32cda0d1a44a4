"""The arrays of one step, built from what the scheduler decided."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate

import numpy as np

from numba_engine.backends.arrays import Array, Batch
from numba_engine.backends.base import Backend
from numba_engine.backends.sampling import SamplingBatch
from numba_engine.scheduling.scheduler import ScheduledSequence
from numba_engine.scheduling.sequence import Sequence


def build_batch(step: Seq[ScheduledSequence], block_size: int, backend: Backend) -> Batch:
    """Lay the new tokens of the step's sequences end to end.

    Everything is counted in lists, which for the few tokens of most steps are faster than arrays, and goes to the
    backend in one piece, as each upload costs the same whatever its size.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    cu_seqlens_q, context_lens, logit_rows = [0], [], []
    for scheduled in step:
        sequence, table = scheduled.sequence, scheduled.sequence.block_table
        first, end = sequence.num_computed_tokens, sequence.num_computed_tokens + scheduled.num_new_tokens
        token_ids += sequence.token_ids[first:end]
        positions += range(first, end)
        slot_mapping += [table[i // block_size] * block_size + i % block_size for i in range(first, end)]
        cu_seqlens_q.append(len(token_ids))
        context_lens.append(end)
        if scheduled.wants_token:
            logit_rows.append(len(token_ids) - 1)
    columns = (token_ids, positions, slot_mapping, cu_seqlens_q, context_lens, logit_rows)
    whole = backend.upload(np.array([value for column in columns for value in column], dtype=np.int32))
    ends = list(accumulate(map(len, columns)))
    parts = [whole[end - len(column) : end] for end, column in zip(ends, columns, strict=True)]
    block_tables = _block_tables([scheduled.sequence for scheduled in step], context_lens, block_size)
    return Batch(
        token_ids=parts[0],
        positions=parts[1],
        slot_mapping=parts[2],
        cu_seqlens_q=parts[3],
        context_lens=parts[4],
        block_tables=backend.upload(block_tables),
        logit_rows=parts[5],
        num_tokens=len(token_ids),
        num_seqs=len(step),
        num_logits=len(logit_rows),
        max_query_len=max(scheduled.num_new_tokens for scheduled in step),
        max_context_len=max(context_lens),
    )


def _block_tables(sequences: Seq[Sequence], context_lens: Seq[int], block_size: int) -> np.ndarray:
    """``[S, max_blocks]``: only the blocks that hold this step's context, padded with 0."""
    num_blocks = [-(-length // block_size) for length in context_lens]
    width = max(num_blocks)
    tables = [s.block_table[:count] + [0] * (width - count) for s, count in zip(sequences, num_blocks, strict=True)]
    return np.array(tables, dtype=np.int32)


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
