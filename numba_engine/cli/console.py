"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console


def wide_console(min_width: int = 110) -> Console:
    """stdout. A table that is narrower than its numbers would drop some where stdout is a pipe of "80 columns"."""
    return Console(width=max(Console().width, min_width), highlight=False)
