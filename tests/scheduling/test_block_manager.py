"""Blocks: who has them, which are shared, which are reused first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_engine.sampling_params import SamplingParams
from numba_engine.scheduling.block_manager import BlockManager
from numba_engine.scheduling.sequence import Sequence

BLOCK_SIZE = 4


def make_sequence(token_ids: list[int]) -> Sequence:
    return Sequence("r", token_ids, SamplingParams(), seed=0, arrival_s=0.0)


def compute(blocks: BlockManager, sequence: Sequence) -> None:
    num_new_tokens = len(sequence) - sequence.num_computed_tokens
    sequence.num_computed_tokens = len(sequence)
    blocks.publish(sequence, num_new_tokens)


@pytest.mark.parametrize(("length", "expected"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_sequence_gets_just_enough_blocks(length: int, expected: int) -> None:
    blocks = BlockManager(8, BLOCK_SIZE, prefix_caching=True)
    sequence = make_sequence(list(range(length)))
    assert blocks.admit(sequence)
    assert len(set(sequence.block_table)) == expected
    assert blocks.num_free_blocks == 8 - expected


def test_admission_refused_changes_nothing() -> None:
    blocks = BlockManager(3, BLOCK_SIZE, prefix_caching=True)
    first, second = make_sequence(list(range(8))), make_sequence(list(range(100, 108)))
    assert blocks.admit(first)
    assert not blocks.admit(second)
    assert (second.block_table, second.num_computed_tokens, blocks.num_free_blocks) == ([], 0, 1)


def test_a_running_sequence_shares_its_full_blocks() -> None:
    blocks = BlockManager(8, BLOCK_SIZE, prefix_caching=True)
    first = make_sequence(list(range(10)))
    blocks.admit(first)
    compute(blocks, first)
    second = make_sequence([*range(8), 99, 98])
    assert blocks.admit(second)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert second.num_computed_tokens == 8
    blocks.release(first)
    assert blocks.num_free_blocks == 8 - 3, "shared blocks stay with the second"


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    blocks = BlockManager(8, BLOCK_SIZE, prefix_caching=True)
    first = make_sequence(list(range(8)))
    blocks.admit(first)
    compute(blocks, first)
    again = make_sequence(list(range(8)))
    blocks.admit(again)
    assert again.num_computed_tokens == 4, "the block with the last token is computed, or there would be no logits"


def test_equal_blocks_after_different_ones_are_not_shared() -> None:
    blocks = BlockManager(8, BLOCK_SIZE, prefix_caching=True)
    first = make_sequence([1, 1, 1, 1, 7, 7, 7, 7, 0])
    blocks.admit(first)
    compute(blocks, first)
    second = make_sequence([2, 2, 2, 2, 7, 7, 7, 7, 0])
    blocks.admit(second)
    assert second.num_computed_tokens == 0


def test_freed_blocks_are_found_again_until_they_are_needed() -> None:
    blocks = BlockManager(4, BLOCK_SIZE, prefix_caching=True)
    first = make_sequence(list(range(9)))
    blocks.admit(first)
    compute(blocks, first)
    blocks.release(first)
    other = make_sequence([50, 51, 52, 53, 54])  # takes the two that hold no full prefix block
    blocks.admit(other)
    again = make_sequence(list(range(9)))
    assert not blocks.admit(again), "two cached and two taken leave none for the third block"
    blocks.release(other)
    assert blocks.admit(again)
    assert again.num_computed_tokens == 8


def test_a_prefix_loses_its_last_block_first() -> None:
    blocks = BlockManager(4, BLOCK_SIZE, prefix_caching=True)
    first = make_sequence(list(range(16)))
    blocks.admit(first)
    compute(blocks, first)
    blocks.release(first)
    other = make_sequence([70, 71])
    blocks.admit(other)
    blocks.release(other)
    again = make_sequence(list(range(16)))
    assert blocks.admit(again)
    assert again.num_computed_tokens == 12


def test_without_prefix_caching_nothing_is_shared() -> None:
    blocks = BlockManager(8, BLOCK_SIZE, prefix_caching=False)
    first = make_sequence(list(range(9)))
    blocks.admit(first)
    compute(blocks, first)
    second = make_sequence(list(range(9)))
    blocks.admit(second)
    assert second.num_computed_tokens == 0
    assert not set(first.block_table) & set(second.block_table)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_block_is_lost_or_given_twice(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 12))
    blocks = BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=data.draw(st.booleans()))
    running: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["admit", "append", "release"]))
        if action == "admit":
            sequence = make_sequence(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=14)))
            if blocks.admit(sequence):
                compute(blocks, sequence)
                running.append(sequence)
        elif action == "append" and running:
            sequence = data.draw(st.sampled_from(running))
            sequence.token_ids.append(data.draw(st.integers(0, 2)))
            if blocks.grow(sequence):
                compute(blocks, sequence)
            else:
                sequence.token_ids.pop()
        elif running:
            sequence = running.pop(data.draw(st.integers(0, len(running) - 1)))
            blocks.release(sequence)
        held = Counter(block for sequence in running for block in sequence.block_table)
        assert blocks.num_free_blocks == num_blocks - len(held)
        for sequence in running:
            assert len(set(sequence.block_table)) == len(sequence.block_table) == blocks.blocks_for(len(sequence))
        prefixes: dict[int, list[int]] = {}
        for sequence in running:  # a block held twice holds the same whole prefix in each
            for i, block in enumerate(sequence.block_table):
                if held[block] > 1:
                    prefix = sequence.token_ids[: (i + 1) * BLOCK_SIZE]
                    assert prefixes.setdefault(block, prefix) == prefix
