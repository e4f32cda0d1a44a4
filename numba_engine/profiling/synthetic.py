"""Sequences of random tokens that decode together, and how long they become until all of them have."""

from __future__ import annotations

import random
from collections.abc import Sequence

from numba_engine.engine.llm import LLM
from numba_engine.engine.validation import ValidRequest
from numba_engine.sampling_params import SamplingParams


def random_requests(llm: LLM, lengths: Sequence[int], params: SamplingParams) -> list[ValidRequest]:
    """Prompts of so many tokens each, drawn anew each time, so that nothing of them is found in the prefix cache."""
    vocabulary = range(llm.model_info.vocab_size)
    return [llm.validate(random.choices(vocabulary, k=length), params) for length in lengths]


def longest_context(num_seqs: int, prompt_len: int, num_steps: int, max_num_batched_tokens: int) -> int:
    """Tokens that the first of the sequences comes to by the time all have decoded together for ``num_steps`` steps.

    It decodes already while the prompts of later ones are computed: a step takes a token of each that decodes, and
    fills what is left of ``max_num_batched_tokens``, at least ``num_seqs``, with prompts, first come, first served.
    """
    assert num_seqs <= max_num_batched_tokens, "they never fit in one step"
    prefill_steps = []  # until each has its first token
    steps, left = 0, 0
    for num_decoding in range(num_seqs):
        budget = max_num_batched_tokens - num_decoding
        more = -(-max(prompt_len - left, 0) // budget)
        left += more * budget - prompt_len
        steps += more
        prefill_steps.append(steps)
    return prompt_len + 1 + prefill_steps[-1] - prefill_steps[0] + num_steps
