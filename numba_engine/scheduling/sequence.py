"""Sequence: the engine's state of one request's tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from numba_engine.sampling_params import SamplingParams


class Sequence:
    """Prompt and output tokens of a request, how far they are computed, and the KV blocks that hold them.

    A sequence is *waiting* while it has no blocks and *running* while it has; the scheduler's queues say which.
    """

    __slots__ = (
        "arrival_s",
        "block_hashes",
        "block_table",
        "first_scheduled_s",
        "num_cached_prompt_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "request_id",
        "seed",
        "token_ids",
    )

    def __init__(
        self, request_id: str, prompt_token_ids: Seq[int], params: SamplingParams, *, seed: int, arrival_s: float
    ) -> None:
        assert prompt_token_ids
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.arrival_s = arrival_s
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        """Tokens whose keys and values are in the cache."""
        self.num_cached_prompt_tokens = 0
        """Prompt tokens found in the prefix cache at first admission."""
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        """Chained hashes of the full blocks of ``token_ids`` computed so far; they survive preemption."""
        self.num_preemptions = 0
        self.first_scheduled_s: float | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_running(self) -> bool:
        return bool(self.block_table)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens not yet in the cache: 1 while decoding, more while prefilling."""
        return len(self.token_ids) - self.num_computed_tokens
