"""DecodeGraphs: decode steps recorded once and replayed, each as one launch in which nothing is patched.

A recording is a step of so many rows and of contexts up to so long, both rounded up, so that a few recordings serve
every batch. It advances the state to the tokens that were drawn last, runs the decoder and draws anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from numba_engine.backends.arrays import Array, Batch
from numba_engine.backends.replay import Pending, Recording, ReplayBackend
from numba_engine.backends.sampling import Sampled
from numba_engine.execution.decode_state import DecodeSize, DecodeState
from numba_engine.scheduling.scheduler import ScheduledStep

SHORTEST_CONTEXT = 256
"""Contexts are rounded up to this many tokens, or twice, four, eight … times as many."""

Forward = Callable[[Batch], Array]
"""A forward pass; the logits of the batch."""


@dataclass(frozen=True, slots=True)
class PendingSampled:
    """What a step in flight draws."""

    arrays: tuple[Pending | None, ...]
    num_seqs: int

    def wait(self) -> Sampled:
        """Without what was drawn for the padding."""
        token_ids, *logprobs = (None if array is None else array.wait()[: self.num_seqs] for array in self.arrays)
        assert token_ids is not None
        return Sampled(token_ids, *logprobs)


class DecodeGraphs:
    """Owns the recordings, and the state they work on."""

    def __init__(
        self, backend: ReplayBackend, forward: Forward, *, max_rows: int, max_blocks: int, block_size: int
    ) -> None:
        self._backend = backend
        self._forward = forward
        self._max_rows = max_rows
        self._block_size = block_size
        self._max_context_len = max_blocks * block_size
        self._state = DecodeState(backend, max_rows, max_blocks, block_size)
        self._num_seqs = 0
        self._recordings: dict[DecodeSize, Recording] = {}

    def takes(self, step: ScheduledStep) -> bool:
        """Whether the step can be replayed: prompts come in too many shapes."""
        return all(scheduled.is_decode for scheduled in step)

    def launch(self, step: ScheduledStep) -> PendingSampled:
        """Run the step; a token for each of its sequences, in its order."""
        self._num_seqs = len(step)
        self._state.hold([scheduled.sequence for scheduled in step], self._padded(len(step)))
        return self._launch()

    def launch_again(self) -> PendingSampled:
        """Run the step after the last one, whose tokens nobody has seen yet. The sequences have blocks for it."""
        self._state.extend_tables()
        return self._launch()

    def record_all(self) -> None:
        """Make the recordings of short contexts of every batch size, so that no request has to wait for what they
        compile. A batch of nothing but padding does for that."""
        for num_rows in sorted({self._padded(num_seqs) for num_seqs in range(1, self._max_rows + 1)}):
            self._state.hold([], num_rows)
            self._launch()

    def _launch(self) -> PendingSampled:
        exact = self._state.size
        size = replace(exact, max_context_len=self._rounded(exact.max_context_len))
        recording = self._recordings.get(size)
        if recording is None:
            self._run(size)  # for this step, and to compile and load what a recording must find ready
            self._recordings[size] = self._record(size)
        else:
            recording.replay()
        self._state.note_step()
        drawn, later = self._state.drawn(size), self._backend.download_later
        arrays = (drawn.token_ids, drawn.logprobs, drawn.top_token_ids, drawn.top_logprobs)
        return PendingSampled(tuple(None if array is None else later(array) for array in arrays), self._num_seqs)

    def _record(self, size: DecodeSize) -> Recording:
        with self._backend.record() as recording:
            self._run(size)
        return recording

    def _run(self, size: DecodeSize) -> None:
        batch, sampling, drawn = self._state.batch(size), self._state.sampling(size), self._state.drawn(size)
        self._backend.advance(batch, sampling, drawn.token_ids, self._block_size)
        self._backend.draw(drawn, self._forward(batch), sampling)

    def _padded(self, num_seqs: int) -> int:
        """1, 2, 4, 8, … rows, and at last as many as there can be."""
        return min(_next_power_of_two(num_seqs), self._max_rows)

    def _rounded(self, context_len: int) -> int:
        return min(SHORTEST_CONTEXT * _next_power_of_two(-(-context_len // SHORTEST_CONTEXT)), self._max_context_len)


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
