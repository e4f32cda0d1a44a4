"""Counters: an engine's totals since it started."""

from __future__ import annotations

from numba_engine.outputs import FinishReason, RequestOutput


class Counters:
    """Totals since the engine started."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.completion_tokens = 0
        self.num_steps = 0
        self.num_finished = 0
        self.num_aborted = 0
        self._busy_s = 0.0

    def count_step(self, elapsed_s: float) -> None:
        self.num_steps += 1
        self._busy_s += elapsed_s

    def count_finished(self, output: RequestOutput) -> None:
        self.num_finished += 1
        self.num_aborted += output.finish_reason is FinishReason.ABORTED
        self.prompt_tokens += output.usage.prompt_tokens
        self.cached_prompt_tokens += output.usage.cached_prompt_tokens
        self.completion_tokens += output.usage.completion_tokens

    def seconds_per_request(self) -> float:
        """How often a place gets free, from the past; what a refused client is told to wait."""
        return min(60.0, max(0.1, self._busy_s / self.num_finished)) if self.num_finished else 1.0
