"""DecodeGraphs: decode steps recorded once and replayed, each as one launch in which nothing is patched.

A recording is a step of so many rows and of contexts up to so long, both rounded up, so that a few recordings serve
every batch. It advances the state to the tokens that were drawn last, runs the decoder and draws anew.
"""

from __future__ import annotations

from collections.abc import Callable

from numba_engine.backends.base import Array, Batch
from numba_engine.backends.replay import Pending, Recording, ReplayBackend
from numba_engine.execution.decode_state import DecodeState
from numba_engine.sampling_params import SamplingParams
from numba_engine.scheduling.scheduler import ScheduledStep

SHORTEST_CONTEXT = 256
"""Contexts are rounded up to this many tokens, or twice, four, eight … times as many."""

Forward = Callable[[Batch], Array]
"""A forward pass; the logits of the batch."""


class DecodeGraphs:
    """Owns the recordings, and the state they work on.

    Prompts, log-probabilities, penalties and logit biases are not for recordings: what they need changes in size from
    step to step.
    """

    def __init__(
        self, backend: ReplayBackend, forward: Forward, *, max_rows: int, max_blocks: int, block_size: int
    ) -> None:
        self._backend = backend
        self._forward = forward
        self._max_rows = max_rows
        self._block_size = block_size
        self._max_context_len = max_blocks * block_size
        self._state = DecodeState(backend, max_rows, max_blocks, block_size)
        self._num_rows = 0
        self._recordings: dict[tuple[int, int], Recording] = {}

    def takes(self, step: ScheduledStep) -> bool:
        """Whether the step can be replayed."""
        return len(step) <= self._max_rows and all(
            scheduled.is_decode and _wants_tokens_only(scheduled.sequence.params) for scheduled in step
        )

    def launch(self, step: ScheduledStep) -> Pending:
        """Run the step; its tokens, in its order, and some more for the padding."""
        self._num_rows = self._padded(len(step))
        self._state.hold([scheduled.sequence for scheduled in step], self._num_rows)
        return self._launch()

    def launch_again(self) -> Pending:
        """Run the step after the last one, whose tokens nobody has seen yet. The sequences have blocks for it."""
        self._state.extend_tables()
        return self._launch()

    def record_all(self) -> None:
        """Make the recordings of short contexts of every batch size, so that no request has to wait for what they
        compile. A batch of nothing but padding does for that."""
        for num_rows in sorted({self._padded(num_seqs) for num_seqs in range(1, self._max_rows + 1)}):
            self._num_rows = num_rows
            self._state.hold([], num_rows)
            self._launch()

    def _launch(self) -> Pending:
        size = self._num_rows, self._rounded(self._state.max_context_len)
        recording = self._recordings.get(size)
        if recording is None:
            self._run(*size)  # for this step, and to compile and load what a recording must find ready
            self._recordings[size] = self._record(*size)
        else:
            recording.replay()
        self._state.note_step()
        return self._backend.download_later(self._state.drawn[: self._num_rows])

    def _record(self, num_rows: int, max_context_len: int) -> Recording:
        with self._backend.record() as recording:
            self._run(num_rows, max_context_len)
        return recording

    def _run(self, num_rows: int, max_context_len: int) -> None:
        state, drawn = self._state, self._state.drawn[:num_rows]
        batch, sampling = state.batch(num_rows, max_context_len), state.sampling(num_rows)
        self._backend.advance(batch, sampling.output_index, drawn, self._block_size)
        self._backend.draw(drawn, self._forward(batch), sampling)

    def _padded(self, num_seqs: int) -> int:
        """1, 2, 4, 8, … rows, and at last as many as there can be."""
        return min(_next_power_of_two(num_seqs), self._max_rows)

    def _rounded(self, context_len: int) -> int:
        return min(SHORTEST_CONTEXT * _next_power_of_two(-(-context_len // SHORTEST_CONTEXT)), self._max_context_len)


def _wants_tokens_only(params: SamplingParams) -> bool:
    return params.logprobs is None and not params.has_penalties and not params.logit_bias


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
