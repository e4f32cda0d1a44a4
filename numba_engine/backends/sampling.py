"""What the sampler takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

from numba_engine.backends.arrays import Array


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """Sampling parameters of the L rows of logits, all of it arrays, so that a captured step finds its own there.

    Lists of different lengths lie in one array: those of row r from ``begins[r]`` up to, without it, ``ends[r]``.
    """

    temperature: Array  # [L] float32, 0 is greedy
    top_k: Array  # [L] int32, 0 keeps all
    top_p: Array  # [L] float32
    min_p: Array  # [L] float32
    repetition_penalty: Array  # [L] float32
    presence_penalty: Array  # [L] float32
    frequency_penalty: Array  # [L] float32
    seed: Array  # [L] uint64
    output_index: Array  # [L] uint32: how many tokens the sequence has put out before this one; the random counter
    history_begins: Array  # [L] int32 into history; an empty list for a row whose three penalties are all neutral
    history_ends: Array  # [L] int32
    history: Array  # [*] int32: prompt then output token ids of the row
    history_prompt_lens: Array  # [L] int32: how many of the row's history are prompt
    bias_begins: Array  # [L] int32 into bias_token_ids and bias_values
    bias_ends: Array  # [L] int32
    bias_token_ids: Array  # [*] int32
    bias_values: Array  # [*] float32
    changes_logits: bool
    """Some row has a history or biases."""


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What the sampler chose; the last three are None where nobody wants log-probabilities."""

    token_ids: Array  # [L] int32
    logprobs: Array | None = None  # [L] float32: of the chosen tokens, log-softmax of the logits as the model gave them
    top_token_ids: Array | None = None  # [L, n] int32, most likely first, ties by lower id
    top_logprobs: Array | None = None  # [L, n] float32
