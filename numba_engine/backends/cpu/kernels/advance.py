"""advance: a batch of one token per sequence takes the tokens that were sampled for it (``CaptureBackend.advance``).

    token_ids = sampled;  positions, context_lens, output_index += 1;  slot_mapping from the block table;
    a history that is not empty grows by the token

Some words a row, by the calling thread alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array, Batch
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.intrinsics import load_i32, store_i32
from numba_engine.backends.sampling import Sampling

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend


def launch(backend: CpuBackend, batch: Batch, sampling: Sampling, token_ids: Array, block_size: int) -> None:
    num_rows, max_blocks = batch.block_tables.shape
    backend.call(
        advance, num_rows, batch.token_ids, batch.positions, batch.slot_mapping,
        batch.context_lens, sampling.output_index, sampling.history_begins,
        sampling.history_ends, sampling.history, token_ids, batch.block_tables,
        max_blocks, block_size.bit_length() - 1,
    )  # fmt: skip


@Command
def advance(
    team: np.ndarray, num_rows: int, token_ids: int, positions: int, slots: int, context_lens: int, output_index: int,
    history_begins: int, history_ends: int, history: int, sampled: int, block_tables: int, max_blocks: int,
    block_shift: int,
) -> None:  # fmt: skip
    for row in range(num_rows):
        position = np.int64(load_i32(context_lens, row))  # of the new token: behind those in the cache
        if position == 0:
            continue
        # -1 where none could be chosen: that row counts for nothing, and the embedding reads a real one for it.
        token = max(load_i32(sampled, row), 0)
        block = np.int64(load_i32(block_tables, row * max_blocks + (position >> block_shift)))
        store_i32(token_ids, row, token)
        store_i32(positions, row, position)
        store_i32(slots, row, (block << block_shift) + (position & ((1 << block_shift) - 1)))
        store_i32(context_lens, row, position + 1)
        store_i32(output_index, row, load_i32(output_index, row) + 1)
        end = load_i32(history_ends, row)
        if end > load_i32(history_begins, row):
            store_i32(history, end, token)
            store_i32(history_ends, row, end + 1)
