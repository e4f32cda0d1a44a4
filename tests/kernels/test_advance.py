"""advance: rows move on by a token; block boundaries are crossed; padding stays."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.arrays import Array, Batch
from numba_engine.backends.capture import CaptureBackend
from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.sampling import Sampling

SIZES = [(num_rows, block_size) for num_rows in (1, 7, 65) for block_size in (8, 16, 128)]


@pytest.mark.parametrize(("num_rows", "block_size"), SIZES)
def test_rows_move_on_and_padding_stays(
    backend: CpuBackend, rng: np.random.Generator, num_rows: int, block_size: int
) -> None:
    check_advance(backend, rng, num_rows, block_size)


def check_advance(backend: CaptureBackend, rng: np.random.Generator, num_rows: int, block_size: int) -> None:
    max_blocks = 5
    contexts = rng.integers(1, max_blocks * block_size, num_rows)
    contexts[: num_rows // 2] = rng.integers(1, max_blocks, num_rows // 2) * block_size  # the first of a block is next
    contexts[num_rows * 3 // 4 + 1 :] = 0
    is_real = contexts > 0
    tables = rng.integers(0, 1000, (num_rows, max_blocks))
    before = {name: rng.integers(0, 50, num_rows) for name in ("token_ids", "positions", "slot_mapping")}
    index, drawn = rng.integers(0, 2**32, num_rows, dtype=np.uint32), rng.integers(0, 50000, num_rows)
    drawn[::5] = -1  # none could be chosen
    room = 6
    begins = room * np.arange(num_rows)
    lengths = rng.integers(0, room, num_rows)
    history = rng.integers(0, 50000, room * num_rows)

    def int32(values: np.ndarray) -> Array:
        return backend.upload(values.astype(np.int32))

    batch = Batch(
        **{name: int32(values) for name, values in before.items()},
        cu_seqlens_q=int32(np.arange(num_rows + 1)),
        context_lens=int32(contexts),
        block_tables=int32(tables),
        logit_rows=int32(np.arange(num_rows)),
        num_tokens=num_rows,
        num_seqs=num_rows,
        num_logits=num_rows,
        max_query_len=1,
        max_context_len=max_blocks * block_size,
    )
    column = int32(np.zeros(num_rows))
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    others = ("seed", "history_prompt_lens", "bias_begins", "bias_ends", "bias_token_ids", "bias_values")
    sampling = Sampling(
        **dict.fromkeys((*names, *others), column),  # advance looks at none of them
        output_index=backend.upload(index),
        history_begins=int32(begins),
        history_ends=int32(begins + lengths),
        history=int32(history),
        changes_logits=True,
    )
    backend.advance(batch, sampling, int32(drawn), block_size)

    drawn = np.maximum(drawn, 0)
    slots = tables[np.arange(num_rows), contexts // block_size] * block_size + contexts % block_size
    for array, moved, stays in [
        (batch.token_ids, drawn, before["token_ids"]),
        (batch.positions, contexts, before["positions"]),
        (batch.slot_mapping, slots, before["slot_mapping"]),
        (batch.context_lens, contexts + 1, contexts),
        (sampling.output_index, index + np.uint32(1), index),
        (sampling.history_ends, begins + lengths + (lengths > 0), begins + lengths),
    ]:
        np.testing.assert_array_equal(backend.download(array), np.where(is_real, moved, stays))
    grows = is_real & (lengths > 0)
    history[(begins + lengths)[grows]] = drawn[grows]
    np.testing.assert_array_equal(backend.download(sampling.history), history)
