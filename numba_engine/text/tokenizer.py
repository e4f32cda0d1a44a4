"""Tokenizer: text to token ids and back, as the model was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from numba_engine.checkpoint import Checkpoint
from numba_engine.errors import FieldViolation, InvalidRequestError
from numba_engine.text.chat_template import ChatTemplate
from numba_engine.text.gguf_tokenizer import read_gguf_tokenizer
from numba_engine.text.hf_tokenizer import read_hf_tokenizer
from numba_engine.text.parts import TokenizerParts
from numba_engine.text.surrogates import lone_surrogate
from numba_engine.text.token_bytes import TokenBytes


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint: a Hugging Face directory's tokenizer.json, or rebuilt from GGUF metadata.

    Raises:
        CheckpointError: files or keys are missing or malformed; says which.
        UnsupportedModelError: a kind of tokenizer that this engine does not have.
    """
    if checkpoint.kind == "gguf":
        return Tokenizer(read_gguf_tokenizer(checkpoint.path, checkpoint.config))
    return Tokenizer(read_hf_tokenizer(checkpoint.path))


class Tokenizer:
    """A model's tokenizer. Any number of threads may use it at once."""

    vocab_size: int
    """One more than the highest token id."""
    max_token_chars: int | None
    """No token stands for more characters of a text; None: there is no such limit."""
    bos_token_id: int | None
    chat_template: ChatTemplate | None
    strip_char: str
    strip_count: int
    """A decoded text loses at most this many ``strip_char`` at its front (SentencePiece's added space)."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._token_bytes = TokenBytes(parts.backend, parts.file)
        self._silent_ids = parts.silent_ids
        added = parts.backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # get_vocab_size() counts tokens, and ids may have gaps.
        vocabulary = parts.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        # Elsewhere an unknown word is one token, however long it is.
        model = parts.backend.model
        knows_all = getattr(model, "byte_fallback", False) or getattr(model, "unk_token", "") is None
        self.max_token_chars = max(map(len, vocabulary), default=0) if knows_all else None
        self._bytes_of_id: list[bytes | None] = [None] * self.vocab_size
        self.bos_token_id = parts.bos_token_id
        self.chat_template = parts.chat_template
        self.strip_char, self.strip_count = self._token_bytes.strip_char, self._token_bytes.strip_count

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``: those that transformers gives with the model's tokenizer.json.

        Special tokens written in the text are recognised; ``add_special_tokens`` adds what the tokenizer puts around
        every text, usually a BOS token or nothing.

        Raises:
            InvalidRequestError: the text has lone surrogates, so it is no Unicode text.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(FieldViolation("prompt", f"must be text, got {type(text).__name__}"))
        if what := lone_surrogate(text):
            raise InvalidRequestError(FieldViolation("prompt", what))
        # A batch, because the library holds the GIL all through encode(), seconds for a long text, and not in here.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the tokens. Bytes that are not UTF-8 become U+FFFD, one for each maximal invalid stretch.

        Spaces are left as they are: ``clean_up_tokenization_spaces`` of old Hugging Face configurations, which
        changes "a ." to "a.", is ignored, as transformers now does, because it corrupts text.

        Raises:
            InvalidRequestError: an id is not in the vocabulary.
        """
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                what = f"token id {token_id} at position {position} is not in 0…{self.vocab_size - 1}"
                raise InvalidRequestError(FieldViolation("token_ids", what))
        kept = (i for i in token_ids if not (skip_special_tokens and i in self._special_ids))
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")
        return text[min(self.strip_count, leading(text, self.strip_char)) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; empty for ids that stand for none, also for ids ≥ ``vocab_size``."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes_of_id[token_id]
        if known is None:
            known = self._bytes_of_id[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._silent_ids:
            return b""
        if (added := self._added.get(token_id)) is not None:
            return self._token_bytes.of_added(added)
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._token_bytes.of(token)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, for display: U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token marks structure (BOS, end of turn) and is skipped in plain text."""
        return token_id in self._special_ids

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant is to speak.

        Raises:
            InvalidRequestError: the model has no chat template, or the template refuses these messages.
        """
        if self.chat_template is None:
            what = "this model has no chat template; send a text prompt instead"
            raise InvalidRequestError(FieldViolation("messages", what))
        # The template writes BOS itself where the model wants one.
        return self.encode(self.chat_template.render(messages), add_special_tokens=False)


def leading(text: str, char: str) -> int:
    """How many of ``char`` the text begins with."""
    return len(text) - len(text.lstrip(char))
