"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console

_MIN_WIDTH = 110


def wide_console() -> Console:
    """stdout. A table that is narrower than its numbers would drop some where stdout is a pipe of "80 columns"."""
    return Console(width=max(Console().width, _MIN_WIDTH), highlight=False)
