"""How long sequences become until all decode together: as the scheduler has it."""

from __future__ import annotations

import pytest

from numba_engine.profiling.synthetic import longest_context
from numba_engine.sampling_params import SamplingParams
from numba_engine.scheduling.block_manager import BlockManager
from numba_engine.scheduling.scheduler import Scheduler
from numba_engine.scheduling.sequence import Sequence


@pytest.mark.parametrize(
    ("num_seqs", "prompt_len", "budget"),
    [(1, 40, 16), (4, 40, 32), (64, 128, 512), (5, 1, 5), (7, 33, 7), (3, 16, 16), (3, 17, 16), (9, 5, 64)],
)
def test_the_first_sequence_is_as_long(num_seqs: int, prompt_len: int, budget: int) -> None:
    blocks = BlockManager(5000, 8, prefix_caching=False)
    scheduler = Scheduler(blocks, max_num_seqs=num_seqs, max_num_batched_tokens=budget)
    sequences = [Sequence(str(i), [7] * prompt_len, SamplingParams(), seed=0, arrival_s=0.0) for i in range(num_seqs)]
    for sequence in sequences:
        scheduler.add(sequence)
    num_together = 0
    while num_together < 3:
        step = scheduler.schedule(0.0)
        scheduler.commit(step)
        num_together += sum(scheduled.is_decode for scheduled in step) == num_seqs
        for scheduled in step:
            if scheduled.needs_sampling:
                scheduled.sequence.token_ids.append(0)
    assert max(map(len, sequences)) == longest_context(num_seqs, prompt_len, 3, budget)
