"""Detokenizer: token ids in, text out, one token at a time, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from numba_engine.text.tokenizer import Tokenizer, leading

_MAX_CHAR_BYTES = 4


class Detokenizer:
    """Decodes one sequence incrementally.

    The strings returned by ``push``, followed by that of ``flush``, are what the ids pushed add to the text of the
    prompt: ``tokenizer.decode`` of both, less that of the prompt, character for character. So a space between them is
    kept, which the decoders of SentencePiece models drop at the front of a text. Bytes that may still become a
    character are held back; bytes that cannot become U+FFFD as soon as that is certain. Costs O(bytes of the token) per
    push.

    Ids that stand for no text (padding of the vocabulary) add nothing; they are no error, since a model may
    have more output rows than its tokenizer has tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_char = tokenizer.strip_char
        self._strip_left = tokenizer.strip_count
        self._follow(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """The text that this token completes; often empty inside a character of several tokens."""
        return self._without_leading(self._utf8.decode(self._bytes(token_id)))

    def flush(self) -> str:
        """The text held back, when no token follows: U+FFFD for an unfinished character. Call it once, at the end."""
        return self._without_leading(self._utf8.decode(b"", final=True))

    def _follow(self, prompt_token_ids: Sequence[int]) -> None:
        """Be where the prompt's text ends, by its first and last tokens."""
        for token_id in prompt_token_ids:
            if not self._strip_left:
                break
            self.push(token_id)
        self._utf8.reset()
        end = b""
        for token_id in reversed(prompt_token_ids):
            if len(end) >= _MAX_CHAR_BYTES:
                break
            end = self._bytes(token_id) + end
        self._utf8.decode(end)  # a prompt may end inside a character

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _without_leading(self, text: str) -> str:
        if self._strip_left and text:
            cut = min(self._strip_left, leading(text, self._strip_char))
            self._strip_left = self._strip_left - cut if cut == len(text) else 0
            return text[cut:]
        return text
