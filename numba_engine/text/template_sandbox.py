"""The Jinja environment of chat templates: what transformers gives them, with limits.

The sandbox keeps a template from reaching Python; the limits keep it from taking all time or memory.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import filters, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context, pass_eval_context
from jinja2.visitor import NodeTransformer

MAX_RENDERED_CHARS = 16 << 20
_MAX_STEPS = 500_000  # loop rounds and calls of one rendering; a message takes some tens
_BUDGET = "__budget__"
_COUNTED, _BOUNDED = "__counted__", "__bounded__"
_MAX_NUMBER = 64  # of columns to pad or indent by
_MAX_INT_BITS = 4096
_FILTERS_THAT_PAD = ("center", "indent", "batch", "slice")
_METHODS_THAT_PAD = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "translate", "format_map"})
# A width or precision of three digits, or one that is an argument; first in % formats, then in those of str.format.
_WIDE_FORMAT = re.compile(r"%(\([^)]*\))?[^%a-zA-Z]*?(\d{3}|\*)|\{[^}]*(\d{3}|\{)")


class _Budget:
    """Steps one rendering may still take. Underscored, so that the sandbox keeps templates away from it."""

    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise SecurityError(f"it takes more than {_MAX_STEPS} steps")


class RefusedByTemplate(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class LimitedTemplate:
    """A compiled template.

    Raises:
        jinja2.TemplateSyntaxError: it is not Jinja.
        RecursionError, MemoryError, SyntaxError, ValueError: it is, but cannot be compiled.
    """

    def __init__(self, source: str) -> None:
        environment = _Sandbox()
        self._template = environment.from_string(_Limits().visit(environment.parse(source)))

    def render(self, values: Mapping[str, Any]) -> str:
        """The text. A template can raise nearly anything; SecurityError where it exceeds a limit."""
        kept: list[str] = []
        size = 0
        for piece in self._template.generate({**values, _BUDGET: _Budget()}):
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise SecurityError(f"the text exceeds {MAX_RENDERED_CHARS} characters")
            kept.append(piece)
        return "".join(kept)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates, with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        del self.globals["lipsum"]  # as much text as a number says
        self.filters |= {name: _with_small_numbers(self.filters[name]) for name in _FILTERS_THAT_PAD}
        self.filters |= {"tojson": _with_small_numbers(_tojson), "format": _format, "join": _join, "replace": _replace}
        self.filters |= {_COUNTED: _counted, _BOUNDED: _bounded}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _SafeNamespace,
            "dict": _new_dict,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _METHODS_THAT_PAD:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget(__context)._spend(1)
        if isinstance(owner := getattr(__obj, "__self__", None), str):
            match __obj.__name__, args:
                case "replace", (str(old), str(new), *count):
                    _check_replace(owner, old, new, *count)
                case "join", (parts,):
                    args = (list(parts),)
                    _check_join(args[0], owner)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "*":
                sized, times = (left, right) if isinstance(left, Sized) else (right, left)
                if isinstance(sized, Sized) and isinstance(times, int):
                    _check_size(len(sized) * times)
            case "**":
                if isinstance(left, int) and isinstance(right, int):
                    _check_size(left.bit_length() * right, _MAX_INT_BITS)
            case "%" if isinstance(left, str):
                _check_format(left)
        return _bounded(super().call_binop(context, operator, left, right))


class _Limits(NodeTransformer):
    """Counts the rounds of every loop, and checks the size of what ``~`` makes: no hook of the sandbox sees these."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, _BOUNDED, [], [], None, None, lineno=node.lineno)


class _SafeNamespace(Namespace):
    """Refuses underscored names, as transformers does."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _SafeNamespace._check(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _SafeNamespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"namespace attribute {name!r} begins with an underscore")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """``dict`` without the type's own methods."""
    return dict(*args, **kwargs)


def _budget(context: Context) -> _Budget:
    # The parent holds what render() passed; a template's own assignments go elsewhere.
    budget = context.parent[_BUDGET]
    assert isinstance(budget, _Budget)
    return budget


@pass_context
def _counted(context: Context, values: Any) -> Any:
    budget = _budget(context)
    if isinstance(values, Sized):
        budget._spend(len(values))
        return values
    return _counting(budget, values)


def _counting(budget: _Budget, values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        budget._spend(1)
        yield value


@pass_eval_context
def _join(eval_context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    parts = list(value)
    _check_join(parts, str(d))
    return filters.sync_do_join(eval_context, parts, d, attribute)


def _replace(text: object, old: object, new: object, count: int | None = None) -> str:
    count = -1 if count is None else count
    _check_replace(str(text), str(old), str(new), count)
    return str(text).replace(str(old), str(new), count)


def _format(text: object, *args: Any, **kwargs: Any) -> str:
    _check_format(str(text))
    return filters.do_format(str(text), *args, **kwargs)


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def limited(value: Any, *args: Any, **kwargs: Any) -> Any:
        for number in (*args, *kwargs.values()):
            if isinstance(number, int):
                _check_size(number, _MAX_NUMBER)
        return _bounded(function(value, *args, **kwargs))

    return limited


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise SecurityError(f"{text!r:.80} may pad text to any width")


def _check_join(parts: Sequence[object], separator: str) -> None:
    _check_size(len(separator) * len(parts) + sum(len(part) for part in parts if isinstance(part, str)))


def _check_replace(text: str, old: str, new: str, count: int = -1) -> None:
    found = text.count(old) if count < 0 else min(text.count(old), count)
    _check_size(len(text) + found * max(len(new) - len(old), 0))


def _bounded(value: Any) -> Any:
    if isinstance(value, Sized):
        _check_size(len(value))
    return value


def _check_size(size: int, limit: int = MAX_RENDERED_CHARS) -> None:
    if size > limit:
        raise SecurityError(f"a value of size {size} exceeds {limit}")


def _raise_exception(message: object) -> NoReturn:
    raise RefusedByTemplate(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what an assistant said, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
