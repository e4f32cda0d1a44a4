"""A conversation at the terminal."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable

from numba_engine_client.client import Client
from numba_engine_client.errors import InferenceError
from numba_engine_client.interrupts import first_interrupt
from numba_engine_client.requests import Message, Sampling
from numba_engine_client.tables import summary_line

with contextlib.suppress(ImportError):
    import readline  # noqa: F401  (input() then edits lines and remembers them)

_HELP = """/reset  forget the conversation
/undo   forget the last message and its answer
/exit   end, as Ctrl-D does
Ctrl-C  stops an answer"""


def run_chat(
    client: Client, *, system: str | None, message: str | None, sampling: Sampling, write: Callable[[str], None]
) -> int:
    """Answer ``message``, or converse until the end of stdin. The exit code."""
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    history = list(opening)
    if message is not None:
        is_complete = _answer(client, history, message, sampling, write)
        return 0 if is_complete else 130

    if sys.stdin is None:  # closed: the conversation has no lines
        return 0
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line of other bytes is no end of the conversation
    if sys.stdin.isatty():
        print("/help lists the commands; Ctrl-D ends.", file=sys.stderr)
    while (line := _read_line()) is not None:
        if not _is_text(line):
            print("error: the line is not UTF-8; it was left out", file=sys.stderr)
            continue
        match line.strip():
            case "":
                continue
            case "/help":
                print(_HELP, file=sys.stderr)
            case "/exit" | "/quit":
                break
            case "/reset":
                history = list(opening)
            case "/undo":
                history = history[:-2] if len(history) > len(opening) else history
            case command if command.startswith("/"):
                print(f"there is no {command.split()[0]}\n{_HELP}", file=sys.stderr)
            case _:
                try:
                    _answer(client, history, line, sampling, write)
                except InferenceError as error:
                    print(f"error: {error}", file=sys.stderr)
    return 0


def _read_line() -> str | None:
    """None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return ""


def _is_text(line: str) -> bool:
    """Not so where bytes of stdin could not be decoded."""
    return not any("\ud800" <= char <= "\udfff" for char in line)


def _answer(
    client: Client, history: list[Message], text: str, sampling: Sampling, write: Callable[[str], None]
) -> bool:
    """Stream the answer and keep both sides in the history; whether it came to its own end.

    A conversation that failed is left as it was before the message.
    """
    user: Message = {"role": "user", "content": text}
    with (
        client.generate(messages=[*history, user], **sampling) as stream,
        first_interrupt(stream.close) as interrupt,
    ):
        try:
            for delta in stream:
                write(delta.text)
        finally:
            write("\n")
    is_complete = not interrupt.is_set()
    history += [user, {"role": "assistant", "content": stream.text}]
    if sys.stderr.isatty() and is_complete:
        print(f"[{summary_line(stream.result)}]", file=sys.stderr)
    return is_complete
