"""Tokens that end an answer although no key of the file may name them."""

from __future__ import annotations

END_TOKEN_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "</s>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "<｜end▁of▁sentence｜>",
    }
)
"""Texts at which llama.cpp ends generation (its end-of-generation tokens), whatever type a GGUF file gives them."""
