"""Scheduler: who moves in the next step, and by how many tokens.

Continuous batching (Yu et al. 2022, "Orca") with chunked prefill (Agrawal et al. 2023, "Sarathi"): every step takes one
token of each decoding sequence and fills what is left of its token budget with prompt chunks. First come, first served.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from numba_engine.scheduling.block_manager import BlockManager
from numba_engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence and how many of its pending tokens this step computes."""

    sequence: Sequence
    num_new_tokens: int
    needs_sampling: bool
    """The step reaches the sequence's end, so its next token is drawn."""
    is_decode: bool
    """It moves on from its own last output token; otherwise these are prompt (or recomputed) tokens."""

    @classmethod
    def within(cls, sequence: Sequence, budget: int) -> ScheduledSequence:
        pending = sequence.num_pending_tokens
        num_new = min(pending, budget)
        return cls(sequence, num_new, num_new == pending, pending == 1 and sequence.num_output_tokens > 0)


ScheduledStep = list[ScheduledSequence]


class Scheduler:
    """Owns the queues and, through the block manager, the KV blocks. Knows nothing of arrays or text."""

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, now_s: float) -> ScheduledStep:
        """The next step; empty when nothing can move (which means nothing is there)."""
        step: ScheduledStep = []
        budget = self._schedule_running(step, self._max_num_batched_tokens)
        self._admit(step, budget, now_s)
        assert step or not (self.running or self.waiting), "a lone sequence always fits: max_model_len is checked"
        return step

    def repeat(self, step: ScheduledStep) -> bool:
        """Make room for the step to be taken once more before the tokens it draws are known.

        False if the next step may be another one: with others in it, or with fewer because of a want of blocks.
        """
        sequences = [scheduled.sequence for scheduled in step if scheduled.is_decode]
        is_full = len(self.running) == self._max_num_seqs
        return (
            sequences == self.running
            and (is_full or not self.waiting)
            and all(self.blocks.grow(sequence, num_unseen=1) for sequence in sequences)
        )

    def commit(self, step: ScheduledStep) -> None:
        """The step's keys and values are in the cache now. Sequences that left meanwhile have no more part in it."""
        for scheduled in step:
            if scheduled.sequence.is_running:
                scheduled.sequence.num_computed_tokens += scheduled.num_new_tokens
                self.blocks.publish(scheduled.sequence, scheduled.num_new_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or aborted sequence and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.blocks.release(sequence)
        else:
            self.waiting.remove(sequence)

    def _schedule_running(self, step: ScheduledStep, budget: int) -> int:
        """Decoding sequences first, so that a long prompt never delays the tokens of others; then prompt chunks."""
        decoding = [s for s in self.running if s.num_pending_tokens == 1]
        prefilling = [s for s in self.running if s.num_pending_tokens > 1]
        for sequence in decoding + prefilling:
            if budget == 0:
                break
            if sequence.block_table and self._make_room(sequence, step):
                step.append(ScheduledSequence.within(sequence, budget))
                budget -= step[-1].num_new_tokens
        return budget

    def _make_room(self, sequence: Sequence, step: ScheduledStep) -> bool:
        """A block for the sequence's last token, preempting the last admitted until there is one.

        False if that was the sequence itself.
        """
        while not self.blocks.grow(sequence):
            victim = self.running[-1]
            step[:] = [scheduled for scheduled in step if scheduled.sequence is not victim]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its tokens are computed anew later (what the prefix cache kept is not)."""
        self.running.remove(sequence)
        self.blocks.release(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _admit(self, step: ScheduledStep, budget: int, now_s: float) -> None:
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            if not self.blocks.admit(sequence):
                break
            self.waiting.popleft()
            self.running.append(sequence)
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now_s
                sequence.num_cached_prompt_tokens = sequence.num_computed_tokens
            step.append(ScheduledSequence.within(sequence, budget))
            budget -= step[-1].num_new_tokens
