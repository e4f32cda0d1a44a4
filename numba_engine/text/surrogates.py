"""Lone surrogates: what a Python string can hold and Unicode text cannot."""

from __future__ import annotations


def lone_surrogate(text: str) -> str | None:
    """What is wrong with ``text`` if it is not Unicode text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is not Unicode text: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
    return None
