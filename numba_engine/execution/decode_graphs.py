"""DecodeGraphs: decode steps captured once and replayed, with nothing patched.

A step is two graphs, replayed one after the other. ``forward`` advances the state to the tokens that were sampled last
and runs the decoder; ``sample`` samples anew. They are apart so that a sampler that must wait for the host does not
keep the forward pass from being launched. Where the backend asks for it, rows and context lengths are rounded up,
so that a few graphs serve every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from numba_engine.backends.arrays import Array, Batch
from numba_engine.backends.capture import CaptureBackend, Graph
from numba_engine.execution.decode_state import DecodeState, ForwardSize, SampleSize
from numba_engine.execution.sampling import PendingTokens, download_later
from numba_engine.scheduling.scheduler import ScheduledStep

SHORTEST_CONTEXT = 256
"""Contexts are rounded up to this many tokens, or twice, four, eight … times as many."""

Forward = Callable[[Batch], object]
"""A forward pass, which leaves the logits of the batch in the same memory each time."""

_Size = TypeVar("_Size", ForwardSize, SampleSize)


class DecodeGraphs:
    """Owns the graphs, and the state they work on.

    ``logits`` is where ``forward`` leaves its own, [max_rows, vocab].
    """

    def __init__(
        self,
        backend: CaptureBackend,
        forward: Forward,
        logits: Array,
        *,
        max_rows: int,
        max_blocks: int,
        block_size: int,
    ) -> None:
        self.can_launch_again = backend.is_asynchronous
        """Before the tokens of a step are read, to any use."""
        self._backend = backend
        self._forward = forward
        self._logits = logits
        self._max_rows = max_rows
        self._block_size = block_size
        self._max_context_len = max_blocks * block_size
        self._state = DecodeState(backend, max_rows, max_blocks, block_size)
        self._num_seqs = 0
        self._forward_graphs: dict[ForwardSize, Graph] = {}
        self._sample_graphs: dict[SampleSize, Graph] = {}

    def supports(self, step: ScheduledStep) -> bool:
        """Whether the step can be replayed: prompts come in too many shapes."""
        return all(scheduled.is_decode for scheduled in step)

    def launch(self, step: ScheduledStep) -> PendingTokens:
        """Run the step; a token for each of its sequences, in its order."""
        self._num_seqs = len(step)
        self._state.prepare([scheduled.sequence for scheduled in step], self._padded(len(step)))
        return self._launch()

    def launch_again(self) -> PendingTokens:
        """Run the step after the last one, whose tokens nobody has seen yet. The sequences have blocks for it."""
        self._state.extend_tables()
        return self._launch()

    def capture_all(self) -> None:
        """Capture the steps of short contexts of every batch size, so that no request has to wait for what they
        compile; where sizes are not rounded, that of one sequence. A batch of nothing but padding does for that."""
        sizes = range(1, self._max_rows + 1) if self._backend.rounds_sizes else (1,)
        for num_rows in sorted({self._padded(num_seqs) for num_seqs in sizes}):
            self._state.prepare([], num_rows)
            self._launch()

    def _launch(self) -> PendingTokens:
        forward_size = self._state.forward_size(self._rounded(self._state.max_context_len))
        sample_size = self._state.sample_size
        self._replay(self._forward_graphs, forward_size, self._run_forward)
        self._replay(self._sample_graphs, sample_size, self._run_sample)
        self._state.advance_host()
        return download_later(self._state.sampled(sample_size), self._num_seqs, self._backend)

    def _replay(self, graphs: dict[_Size, Graph], size: _Size, run: Callable[[_Size], None]) -> None:
        if size in graphs:
            graphs[size].replay()
            return
        run(size)  # for this step, and to compile and load what a capture must find ready
        with self._backend.capture() as graph:
            run(size)
        graphs[size] = graph

    def _run_forward(self, size: ForwardSize) -> None:
        batch, sampling = self._state.batch(size), self._state.sampling(size)
        self._backend.advance(batch, sampling, self._state.token_ids(size), self._block_size)
        self._forward(batch)

    def _run_sample(self, size: SampleSize) -> None:
        self._backend.sample(self._state.sampled(size), self._logits[: size.num_rows], self._state.sampling(size))

    def _padded(self, num_seqs: int) -> int:
        """1, 2, 4, 8, … rows, and at last as many as there can be."""
        return min(_next_power_of_two(num_seqs), self._max_rows) if self._backend.rounds_sizes else num_seqs

    def _rounded(self, context_len: int) -> int:
        if not self._backend.rounds_sizes:
            return self._max_context_len
        return min(SHORTEST_CONTEXT * _next_power_of_two(-(-context_len // SHORTEST_CONTEXT)), self._max_context_len)


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
