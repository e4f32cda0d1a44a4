"""The worker process of chat templates: it imports jinja2 and the standard library only, and knows limits.

``chat_template.py`` runs this file as a program. One JSON object per line goes each way: first the template, then, once
the worker is ready, the values of each rendering. Templates come with model files and are not trusted: Jinja's sandbox
keeps them from reaching Python, limits of the process from taking its memory and time (Jinja computes constants when it
compiles), and whoever waits for an answer kills it after a while.
"""

from __future__ import annotations

import json
import math
import sys
import time
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

MAX_RENDERED_CHARS = 16 << 20
MAX_MEMORY_BYTES = 768 << 20
MAX_CPU_S = 2


class _RefusedByTemplate(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what an assistant said, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedByTemplate(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compiled(source: str) -> jinja2.Template | str:
    """The template, or what is wrong with it."""
    try:
        return _Sandbox().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        return f"is not valid Jinja: line {error.lineno}: {error.message}"
    except Exception as error:
        return f"cannot be compiled: {type(error).__name__}: {error}"


def _rendered(template: jinja2.Template, values: dict[str, Any]) -> str:
    kept: list[str] = []
    size = 0
    for piece in template.generate(values):
        size += len(piece)
        if size > MAX_RENDERED_CHARS:
            raise SecurityError(f"the text exceeds {MAX_RENDERED_CHARS} characters")
        kept.append(piece)
    return "".join(kept)


def _answer(template: jinja2.Template | str, values: dict[str, Any]) -> dict[str, str]:
    """The text, or what came instead of it: a template can raise nearly anything."""
    if isinstance(template, str):
        return {"invalid": template}
    try:
        text = _rendered(template, values)
        text.encode()  # a template can make what is no text
        return {"text": text}
    except _RefusedByTemplate as error:
        return {"error": f"refuses them: {error.message}"}
    except (RecursionError, MemoryError) as error:
        return {"error": f"needs too much to render them: {type(error).__name__}"}
    except Exception as error:
        return {"error": f"cannot render them: {type(error).__name__}: {error}"[:1000]}


def _limit_memory() -> None:
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _limit_time() -> None:
    """The system ends this process after so much more time at work, whether somebody waits for it or not."""
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + MAX_CPU_S, hard))


def main() -> None:
    _limit_memory()
    _limit_time()
    requests = map(json.loads, sys.stdin.buffer)
    template = _compiled(next(requests)["template"])
    _say({"ready": True})
    for values in requests:
        _limit_time()
        _say(_answer(template, values))


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
