"""advance: move a batch of one token a sequence on to the tokens that were drawn for it, without the host.

    token_ids = drawn;  positions, context_lens, output_index += 1;  slot_mapping from the block table;
    a history that is not empty grows by the token

Arrays (flat), S rows: token_ids, positions, slot_mapping, context_lens int32; output_index uint32; drawn int32;
block_tables int32 [S, max_blocks]; history int32, of which row r has history_begins[r] … history_ends[r] - 1 and room
for more. Rows with a context_len of 0 are padding and stay as they are.

A thread a row. Bytes moved: a few words a row.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from numba import cuda
from numba.cuda.types import int32, uint32

from numba_engine.backends.arrays import Array, Batch
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.sampling import Sampling

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 64


@cache
def advance_kernel() -> Kernel:
    def advance(  # type: ignore[no-untyped-def]
        token_ids,
        positions,
        slot_mapping,
        context_lens,
        output_index,
        history_ends,
        history,
        history_begins,
        drawn,
        block_tables,
        num_rows,
        max_blocks,
        log2_block,
    ):
        row = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if row >= num_rows:
            return
        position = uint32(context_lens[row])  # of the new token: behind those in the cache
        if position == uint32(0):
            return
        block = uint32(block_tables[uint32(row * max_blocks + (position >> log2_block))])
        offset = uint32(position & uint32((uint32(1) << log2_block) - uint32(1)))
        # -1 where none could be drawn: that row counts for nothing, and the embedding reads a real one for it.
        token = max(drawn[row], int32(0))
        token_ids[row] = token
        positions[row] = int32(position)
        slot_mapping[row] = int32(uint32(block << log2_block) | offset)
        context_lens[row] = int32(uint32(position + uint32(1)))
        output_index[row] = uint32(output_index[row] + uint32(1))
        end = uint32(history_ends[row])
        if end > uint32(history_begins[row]):
            history[end] = token
            history_ends[row] = int32(uint32(end + uint32(1)))

    integers = int32[::1]
    arguments = (*[integers] * 4, uint32[::1], *[integers] * 5, uint32, uint32, uint32)
    return Kernel("advance", advance, arguments, THREADS)


def launch(backend: CudaBackend, batch: Batch, sampling: Sampling, token_ids: Array, block_size: int) -> None:
    b, s = batch, sampling
    num_rows, max_blocks = b.block_tables.shape
    written = [b.token_ids, b.positions, b.slot_mapping, b.context_lens, s.output_index, s.history_ends, s.history]
    read = [s.history_begins, token_ids, b.block_tables]
    sizes = [num_rows, max_blocks, block_size.bit_length() - 1]
    backend.launch(advance_kernel(), -(-num_rows // THREADS), [*written, *read, *sizes])
