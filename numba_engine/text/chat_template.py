"""ChatTemplate: a model's Jinja template that writes a conversation as the text the model was trained on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numba_engine.errors import FieldViolation, InvalidRequestError
from numba_engine.text.surrogates import lone_surrogate

RENDER_LIMIT_S = 5.0
"""A rendering takes a millisecond; a long conversation takes some tens."""
_START_LIMIT_S = 30.0
"""For a worker to start Python and compile the template."""
_WORKER = Path(__file__).with_name("template_worker.py")
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "SYSTEMROOT", "TZ", "LANG")
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


class ChatTemplate:
    """A chat template, rendered by a worker process. Any number of threads may render; they take turns.

    Templates come with model files and are not trusted: see ``template_worker.py``. A worker that takes too long or
    dies is replaced. A template that is no Jinja refuses chats, and nothing else: its model continues plain prompts.

    Args:
        source: the template, Jinja as transformers runs it.
        special_tokens: what ``bos_token``, ``eos_token``, … stand for in the template.
        file: where it was read from, for error messages.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, file: str) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._file = file
        self._lock = threading.Lock()
        self._worker: _Worker | None = _Worker(source)  # at work while weights load

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as text, ending where the assistant is to speak.

        Raises:
            InvalidRequestError: malformed messages, or ones that the template refuses or cannot write.
        """
        _check_messages(messages)
        values = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        answer = self._ask(values)
        if (text := answer.get("text")) is not None:
            return text
        if invalid := answer.get("invalid"):
            what = f"the chat template of {self._file} {invalid}; send a text prompt instead"
        else:
            what = f"the model's chat template {answer['error']}"
        raise InvalidRequestError(FieldViolation("messages", what))

    def _ask(self, values: Mapping[str, Any]) -> dict[str, str]:
        with self._lock:
            worker = self._worker or _Worker(self._source)
            self._worker = None
            answer = worker.ask(values)
            if answer is not None:
                self._worker = worker
                return answer
            worker.stop()
        return {"error": f"takes too much time or memory; the limit is {RENDER_LIMIT_S:g} s"}


class _Worker:
    """A process that renders one template. It ends with this object, and with the process that made it."""

    def __init__(self, source: str) -> None:
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        # -P: the folder of the script, full of our modules, is no place to import from.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-s", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is not for it
        )
        self.stop = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._is_ready = False
        self._send({"template": source})

    def ask(self, values: Mapping[str, Any]) -> dict[str, str] | None:
        """What it answers; None if it did not within its time."""
        if not self._is_ready:
            self._is_ready = self._read(_START_LIMIT_S) is not None
        return self._read(RENDER_LIMIT_S) if self._is_ready and self._send(values) else None

    def _send(self, line: Mapping[str, Any]) -> bool:
        try:
            self._stdin.write(json.dumps(line).encode() + b"\n")
            self._stdin.flush()
        except OSError:  # it is gone
            return False
        return True

    def _read(self, limit_s: float) -> dict[str, str] | None:
        overdue = threading.Timer(limit_s, self._process.kill)
        overdue.start()
        answer = self._stdout.readline()
        overdue.cancel()
        return json.loads(answer) if answer.endswith(b"\n") else None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was written to a process that is gone
            pipe.close()  # type: ignore[union-attr]
    process.wait()


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)  # an iterator can be read once
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        what = "must be a list of objects with role and content"
        raise InvalidRequestError(FieldViolation("messages", what))
    bad: list[FieldViolation] = []
    if not messages:
        bad.append(FieldViolation("messages", "must hold at least one message"))
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            what = f'must be a name such as "system", "user" or "assistant", got {role!r:.80}'
            bad.append(FieldViolation(f"messages[{i}].role", what))
        if not isinstance(content, str):
            bad.append(FieldViolation(f"messages[{i}].content", f"must be text, got {type(content).__name__}"))
        elif surrogate := lone_surrogate(content):
            bad.append(FieldViolation(f"messages[{i}].content", surrogate))
    if bad:
        raise InvalidRequestError(*bad)
