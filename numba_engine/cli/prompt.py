"""What a command runs on: text, a file taken byte for byte, or a chat message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from numba_engine.cli.console import read_stdin

if TYPE_CHECKING:
    from numba_engine.engine.llm import LLM

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Prompt:
    """One input, not yet tokenised: plain ``text``, or the user's message of a chat."""

    text: str
    is_chat: bool = False
    system: str | None = None

    def token_ids(self, llm: LLM) -> list[int]:
        """As the model would be given it: special tokens recognised; a chat in the model's own template."""
        if not self.is_chat:
            return llm.tokenize(self.text)
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return llm.apply_chat_template([*system, {"role": "user", "content": self.text}])


def prompt_options(command: _Command) -> _Command:
    """Add --prompt, --prompt-file, --chat and --system."""
    for option in (
        click.option("--system", metavar="TEXT", help="System message before --chat."),
        click.option("--chat", metavar="TEXT", help="A user's message, put into the model's template; - is stdin."),
        click.option("--prompt-file", metavar="FILE", help="Text to continue, byte for byte; - is stdin."),
        click.option("--prompt", metavar="TEXT", help="Text to continue; - reads it from stdin."),
    ):
        command = option(command)
    return command


def read_prompt(
    prompt: str | None, prompt_file: str | None, chat: str | None, system: str | None, default: str | None = None
) -> Prompt:
    """The one input that was given, else ``default``.

    Raises:
        click.UsageError: unless exactly one is given, or when its bytes are not UTF-8.
    """
    given = [value for value in (prompt, prompt_file, chat) if value is not None]
    if len(given) > 1 or (not given and default is None):
        raise click.UsageError("give exactly one of --prompt, --prompt-file and --chat")
    if system is not None and chat is None:
        raise click.UsageError("--system goes with --chat")
    if prompt_file is not None:
        return Prompt(_read_file(prompt_file))
    if chat is not None:
        return Prompt(_read_argument("--chat", chat), is_chat=True, system=_read_argument("--system", system))
    return Prompt(_read_argument("--prompt", prompt if prompt is not None else default))


def _read_argument(name: str, value: Any) -> Any:
    if value is None:
        return None
    if value == "-" and name != "--system":
        return _decode("stdin", read_stdin())
    try:
        value.encode()
    except UnicodeEncodeError as error:  # argv bytes that are no UTF-8 arrive as lone surrogates
        raise click.UsageError(f"{name} is not UTF-8 at character {error.start}") from error
    return value


def _read_file(path: str) -> str:
    if path == "-":
        return _decode("stdin", read_stdin())
    try:
        with open(path, "rb") as file:
            return _decode(path, file.read())
    except OSError as error:
        raise click.UsageError(f"--prompt-file {path}: {error.strerror}") from error


def _decode(source: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"{source} is not UTF-8: {error.reason} (0x{data[error.start]:02x}) at byte {error.start}"
        ) from error
