"""Steps: who is in them, with how many tokens, and who gives way when blocks run out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from numba_engine.sampling_params import SamplingParams
from numba_engine.scheduling.block_manager import BlockManager
from numba_engine.scheduling.scheduler import ScheduledStep, Scheduler
from numba_engine.scheduling.sequence import Sequence


def make_scheduler(*, num_blocks: int = 100, block_size: int = 4, max_num_seqs: int = 8, budget: int = 16) -> Scheduler:
    blocks = BlockManager(num_blocks, block_size, prefix_caching=False)
    return Scheduler(blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def make_sequence(name: str, length: int) -> Sequence:
    return Sequence(name, list(range(length)), SamplingParams(), seed=0, arrival_s=0.0)


def summary(step: ScheduledStep) -> list[tuple[str, int, bool]]:
    return [(s.sequence.request_id, s.num_new_tokens, s.needs_sampling) for s in step]


def run_step(scheduler: Scheduler) -> list[tuple[str, int, bool]]:
    step = scheduler.schedule(now_s=0.0)
    scheduler.commit(step)
    for scheduled in step:
        if scheduled.needs_sampling:
            scheduled.sequence.token_ids.append(0)
    return summary(step)


def test_a_long_prompt_is_prefilled_in_chunks_and_only_the_last_draws() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_sequence("a", 40))
    assert [run_step(scheduler) for _ in range(4)] == [
        [("a", 16, False)],
        [("a", 16, False)],
        [("a", 8, True)],
        [("a", 1, True)],
    ]


def test_decoding_goes_on_beside_a_long_prefill() -> None:
    scheduler = make_scheduler(budget=16)
    scheduler.add(make_sequence("a", 3))
    run_step(scheduler)
    scheduler.add(make_sequence("b", 30))
    assert run_step(scheduler) == [("a", 1, True), ("b", 15, False)]
    assert run_step(scheduler) == [("a", 1, True), ("b", 15, True)]
    assert run_step(scheduler) == [("a", 1, True), ("b", 1, True)]


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_sequence(name, 2))
    assert [name for name, _, _ in run_step(scheduler)] == ["a", "b"]
    scheduler.remove(scheduler.running[0])
    assert [name for name, _, _ in run_step(scheduler)] == ["b", "c"]


def test_admission_waits_for_blocks_in_order_of_arrival() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_sequence("a", 11))
    scheduler.add(make_sequence("b", 8))  # needs 2 blocks, 1 is free
    scheduler.add(make_sequence("c", 2))  # would fit, but does not overtake
    assert [name for name, _, _ in run_step(scheduler)] == ["a"]


def test_the_last_admitted_gives_way_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=4)
    first, second, third = make_sequence("a", 8), make_sequence("b", 7), make_sequence("c", 1)
    for sequence in (first, second):
        scheduler.add(sequence)
    run_step(scheduler)
    scheduler.add(third)
    # All four blocks are taken and the first needs a fifth: the second gives way, its two blocks are free again.
    assert run_step(scheduler) == [("a", 1, True)]
    assert (second.num_preemptions, second.num_computed_tokens, second.block_table) == (1, 0, [])
    assert [s.request_id for s in scheduler.waiting] == ["b", "c"]
    scheduler.remove(first)
    assert run_step(scheduler) == [("b", 8, True), ("c", 1, True)], "its one output token is computed anew as well"
    assert scheduler.num_preemptions == 1


def test_removed_while_waiting_or_running() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = make_sequence("a", 5), make_sequence("b", 5)
    scheduler.add(running)
    scheduler.add(waiting)
    run_step(scheduler)
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert scheduler.blocks.num_free_blocks == 100
    assert scheduler.schedule(now_s=0.0) == []


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 8)), min_size=1, max_size=8),
    num_blocks=st.integers(8, 16),
    budget=st.integers(1, 20),
    max_num_seqs=st.integers(1, 8),
)
def test_every_sequence_gets_all_its_tokens(
    lengths: list[tuple[int, int]], num_blocks: int, budget: int, max_num_seqs: int
) -> None:
    """Whatever the pressure: prompts of up to 24 and outputs of up to 8 tokens fit 8 blocks of 4 alone, if barely."""
    scheduler = make_scheduler(num_blocks=num_blocks, budget=budget, max_num_seqs=max_num_seqs)
    wanted: dict[str, int] = {}
    for i, (prompt_len, output_len) in enumerate(lengths):
        scheduler.add(make_sequence(str(i), prompt_len))
        wanted[str(i)] = output_len
    for _ in range(20_000):
        step = scheduler.schedule(now_s=0.0)
        if not step:
            break
        assert sum(scheduled.num_new_tokens for scheduled in step) <= budget
        assert len(scheduler.running) <= max_num_seqs
        assert len({scheduled.sequence.request_id for scheduled in step}) == len(step)
        for scheduled in step:
            end = scheduled.sequence.num_computed_tokens + scheduled.num_new_tokens
            assert scheduler.blocks.blocks_for(end) <= len(scheduled.sequence.block_table)
        scheduler.commit(step)
        for scheduled in step:
            if scheduled.needs_sampling:
                sequence = scheduled.sequence
                sequence.token_ids.append(0)
                if sequence.num_output_tokens == wanted[sequence.request_id]:
                    scheduler.remove(sequence)
                    del wanted[sequence.request_id]
    assert wanted == {}
    assert scheduler.blocks.num_free_blocks == num_blocks
