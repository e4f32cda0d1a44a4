"""The arrays of one step, built from what the scheduler decided."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np

from numba_engine.backends.arrays import Batch
from numba_engine.backends.base import Backend
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
        if scheduled.needs_sampling:
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
