"""What the service says, laid out for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numba_engine_client.results import Generation


def summary_line(generation: Generation) -> str:
    """What a generation read and wrote, and how fast."""
    usage, timings = generation.usage, generation.timings
    cached = f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else ""
    # The first token belongs to the prompt's time, so n tokens make n - 1 intervals.
    rate = f", {(usage.completion_tokens - 1) / timings.decode_s:.1f} tok/s" if timings.decode_s > 0 else ""
    return (
        f"prompt: {usage.prompt_tokens} tokens{cached}, first token after {timings.ttft_s:.3f} s; "
        f"output: {usage.completion_tokens} tokens{rate}; finished by {generation.finish_reason}"
    )


def fields_table(fields: Mapping[str, Any]) -> str:
    """Nested fields as ``name.inner  value`` lines."""
    return "\n".join(aligned([*_flat(fields)], first_left=2))


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", ", ".join(str(item) for item in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield f"{prefix}{name}", f"{value:,}"
        else:
            yield f"{prefix}{name}", f"{value:.6g}" if isinstance(value, float) else str(value)


def aligned(rows: Sequence[Sequence[str]], *, first_left: int = 1) -> list[str]:
    """Columns of equal width: the first ``first_left`` and the last to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    lefts = {*range(first_left), len(widths) - 1}
    return [
        "  ".join(
            cell.ljust(width) if column in lefts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def size(num_bytes: float) -> str:
    """Decimal: 1 MB is a million bytes."""
    for unit, unit_bytes in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.1f}" if tokens_per_s < 1000 else f"{tokens_per_s:,.0f}"


def enum_word(enum: Any, value: int, prefix: str) -> str:
    """``host clock`` for ``TIME_SOURCE_HOST_CLOCK``; ``unknown`` for one that this client does not know."""
    name: str = enum.Name(value) if value in enum.values() else "unknown"
    return name.removeprefix(prefix).lower().replace("_", " ")
