"""What commands read and write: text as UTF-8 whatever the locale, JSON that every parser reads, tables."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from typing import Any

import click
from rich.console import Console


def wide_console(min_width: int = 110) -> Console:
    """stdout. A table that is narrower than its numbers would drop some where stdout is a pipe of "80 columns"."""
    return Console(width=max(Console().width, min_width), highlight=False)


def write_text(text: str) -> None:
    """To stdout, at once."""
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def print_json(value: Any) -> None:
    """A line on stdout."""
    write_text(to_json(value) + "\n")


def to_json(value: Any) -> str:
    """Strict JSON of what can be encoded: null for numbers that are NaN or infinite, ? for bytes that are no UTF-8."""
    text = json.dumps(_without_nan(value), ensure_ascii=False, allow_nan=False)
    return text.encode(errors="replace").decode()


def read_stdin() -> bytes:
    """All of it; nothing where it is closed."""
    return b"" if sys.stdin is None else sys.stdin.buffer.read()


def prepare_streams(*, needs_stdout: bool) -> None:
    """Be ready for streams that are closed, and for a locale that lacks a character.

    Raises:
        click.UsageError: stdout is closed, and the command is there for what it writes to it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # or a file opened later would be in its place, and get what is meant for the terminal
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None and needs_stdout:
        raise click.UsageError("stdout is closed, and the result would be written there")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return value
