"""What a tokenizer is made of, whatever kind of file it was read from."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers

from numba_engine.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerParts:
    """The checked contents of a checkpoint's tokenizer; ``Tokenizer`` is built from it."""

    file: str
    """Where it was read from, for error messages."""
    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    chat_template: ChatTemplate | None
    silent_ids: frozenset[int] = frozenset()
    """Ids that only pad the vocabulary: they stand for no text."""
