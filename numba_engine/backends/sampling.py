"""What the sampler takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_engine.backends.arrays import Array


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Sampling parameters of the L rows of logits, as arrays. Ragged lists are (offsets [L + 1], values)."""

    temperature: Array  # [L] float32, 0 is greedy
    top_k: Array  # [L] int32, 0 keeps all
    top_p: Array  # [L] float32
    min_p: Array  # [L] float32
    repetition_penalty: Array  # [L] float32
    presence_penalty: Array  # [L] float32
    frequency_penalty: Array  # [L] float32
    seed: Array  # [L] uint64
    output_index: Array  # [L] uint32: how many tokens the sequence has put out before this one; the random counter
    history_offsets: Array  # [L + 1] int32 into history; empty for a row whose three penalties are all neutral
    history: Array  # [*] int32: prompt then output token ids of the row
    history_prompt_lens: Array  # [L] int32: how many of the row's history are prompt
    bias_offsets: Array  # [L + 1] int32
    bias_token_ids: Array  # [*] int32
    bias_values: Array  # [*] float32
    num_logits: int
    num_top_logprobs: int
    """n most likely tokens wanted for every row (the most any row asks for); -1 when no row wants log-probabilities."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What the sampler chose, on the host."""

    token_ids: np.ndarray  # [L] int32
    logprobs: np.ndarray | None  # [L] float32: of the chosen tokens, log-softmax of the logits as the model gave them
    top_token_ids: np.ndarray | None  # [L, n] int32, most likely first, ties by lower id
    top_logprobs: np.ndarray | None  # [L, n] float32
