"""The arrays of one step, built from what the scheduler decided."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from numba_engine.backends.base import Backend, Batch, SamplingBatch
from numba_engine.scheduling.scheduler import ScheduledSequence
from numba_engine.scheduling.sequence import Sequence


def build_batch(step: Seq[ScheduledSequence], block_size: int, backend: Backend) -> Batch:
    """Lay the new tokens of the step's sequences end to end."""
    query_lens = np.array([scheduled.num_new_tokens for scheduled in step], dtype=np.int32)
    computed = np.array([scheduled.sequence.num_computed_tokens for scheduled in step], dtype=np.int32)
    cu_seqlens_q = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    context_lens = computed + query_lens
    sequence_of_row = np.repeat(np.arange(len(step)), query_lens)
    positions = np.arange(cu_seqlens_q[-1], dtype=np.int32) + (computed - cu_seqlens_q[:-1])[sequence_of_row]
    block_tables = _block_tables([scheduled.sequence for scheduled in step], context_lens, block_size)
    slot_mapping = block_tables[sequence_of_row, positions // block_size] * block_size + positions % block_size
    logit_rows = [cu_seqlens_q[i + 1] - 1 for i, scheduled in enumerate(step) if scheduled.wants_token]
    return Batch(
        token_ids=backend.upload(np.concatenate([_new_token_ids(scheduled) for scheduled in step])),
        positions=backend.upload(positions.astype(np.int32)),
        slot_mapping=backend.upload(slot_mapping.astype(np.int32)),
        cu_seqlens_q=backend.upload(cu_seqlens_q),
        context_lens=backend.upload(context_lens.astype(np.int32)),
        block_tables=backend.upload(block_tables),
        logit_rows=backend.upload(np.array(logit_rows, dtype=np.int32)),
        num_tokens=int(cu_seqlens_q[-1]),
        num_seqs=len(step),
        num_logits=len(logit_rows),
        max_query_len=int(query_lens.max()),
        max_context_len=int(context_lens.max()),
    )


def _new_token_ids(scheduled: ScheduledSequence) -> np.ndarray:
    first = scheduled.sequence.num_computed_tokens
    return np.array(scheduled.sequence.token_ids[first : first + scheduled.num_new_tokens], dtype=np.int32)


def _block_tables(sequences: Seq[Sequence], context_lens: np.ndarray, block_size: int) -> np.ndarray:
    """``[S, max_blocks]``: only the blocks that hold this step's context, padded with 0."""
    num_blocks = -(-context_lens // block_size)
    tables = np.zeros((len(sequences), int(num_blocks.max())), dtype=np.int32)
    for row, sequence, count in zip(tables, sequences, num_blocks, strict=True):
        row[:count] = sequence.block_table[:count]
    return tables


def build_sampling_batch(sequences: Seq[Sequence], backend: Backend) -> SamplingBatch:
    """Parameters of the sequences whose next token is drawn, one row each."""
    params = [sequence.params for sequence in sequences]

    def column(name: str, dtype: type[np.generic]) -> np.ndarray:
        return backend.upload(np.array([getattr(p, name) for p in params], dtype=dtype))  # type: ignore[return-value]

    histories = [sequence.token_ids if _has_penalties(sequence) else [] for sequence in sequences]
    return SamplingBatch(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        presence_penalty=column("presence_penalty", np.float32),
        frequency_penalty=column("frequency_penalty", np.float32),
        seed=backend.upload(np.array([sequence.seed for sequence in sequences], dtype=np.uint64)),
        output_index=backend.upload(np.array([s.num_output_tokens for s in sequences], dtype=np.uint32)),
        history_offsets=backend.upload(_offsets(histories)),
        history=backend.upload(_concatenated(histories, np.int32)),
        history_prompt_lens=backend.upload(
            np.array([s.num_prompt_tokens if _has_penalties(s) else 0 for s in sequences], dtype=np.int32)
        ),
        bias_offsets=backend.upload(_offsets([p.logit_bias for p in params])),
        bias_token_ids=backend.upload(_concatenated([list(p.logit_bias) for p in params], np.int32)),
        bias_values=backend.upload(_concatenated([list(p.logit_bias.values()) for p in params], np.float32)),
        num_logits=len(sequences),
        num_top_logprobs=max(-1 if p.logprobs is None else p.logprobs for p in params),
    )


def _has_penalties(sequence: Sequence) -> bool:
    p = sequence.params
    return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0


def _offsets(lists: Iterable[Seq[int] | object]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(values) for values in lists])]).astype(np.int32)  # type: ignore[arg-type]


def _concatenated(lists: Iterable[Seq[float]], dtype: type[np.generic]) -> np.ndarray:
    return np.array([value for values in lists for value in values], dtype=dtype)
