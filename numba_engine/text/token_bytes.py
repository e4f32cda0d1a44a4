"""TokenBytes: the bytes each token stands for, so that text can be decoded token by token.

Every decoder of the Llama family is a concatenation: each token stands for some bytes whatever its neighbours are, and
the text is those bytes read as UTF-8, possibly without its first space. A decoder that does not work like
that (WordPiece and others that look at neighbours) is refused when the tokenizer is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

from numba_engine.errors import UnsupportedModelError

_SUPPORTED = "none, ByteLevel, or a Sequence of Replace, ByteFallback, Fuse and one leading Strip"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Maps tokens to bytes as a ``tokenizers`` decoder would.

    It departs from that library in one place, on purpose: in a run of byte tokens (``<0xE2>``) that is not valid UTF-8,
    only the invalid bytes become U+FFFD, where the library replaces the valid characters of the run too. That makes the
    text of a token independent of tokens that have not been generated yet.

    Raises:
        UnsupportedModelError: the decoder is not a concatenation.
    """

    strip_char: str
    """The character removed from the front of the text …"""
    strip_count: int
    """… at most this often."""

    def __init__(self, backend: tokenizers.Tokenizer, file: str) -> None:
        decoder = backend.decoder
        state = None if decoder is None else json.loads(decoder.__getstate__())
        self.strip_char, self.strip_count = " ", 0
        self._of: Callable[[str], bytes]
        if state is None:
            # The library joins tokens with a space where there is no decoder.
            self.strip_count = 1
            self._of = lambda token: f" {token}".encode()
        elif state.get("type") == "ByteLevel":
            self._of = _byte_level
        else:
            steps = state.get("decoders") if state.get("type") == "Sequence" else [state]
            self._of = self._sequence(steps, file)

    def of(self, token: str) -> bytes:
        """The bytes of one token of the vocabulary."""
        return self._of(token)

    def of_added(self, token: str) -> bytes:
        """The bytes of a token that was added to the vocabulary: its content is text, not GPT-2's names of bytes."""
        return token.encode() if self._of is _byte_level else self._of(token)

    def _sequence(self, steps: Sequence[Mapping[str, Any]], file: str) -> Callable[[str], bytes]:
        if [step.get("type") for step in steps] == ["ByteLevel"]:
            return _byte_level
        replacements: list[tuple[str, str]] = []
        byte_fallback = fused = False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not byte_fallback:
                    replacements.append((old, new))
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": str(char), "start": int(count), "stop": 0} if fused:
                    self.strip_char, self.strip_count = char, count
                case _:
                    raise UnsupportedModelError("decoder", step, _SUPPORTED, file=file)

        def of(token: str) -> bytes:
            for old, new in replacements:
                token = token.replace(old, new)
            if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
                return bytes([int(byte[1], 16)])
            return token.encode()

        return of


def _byte_level(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    except KeyError:  # a token of the vocabulary that is no name of bytes, as some converters leave them
        return token.encode()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's reversible naming of bytes: printable Latin-1 stands for itself, the rest for U+0100 and up, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
