"""ChatTemplate: a model's Jinja template that writes a conversation as the text the model was trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import jinja2

from numba_engine.errors import CheckpointError, FieldViolation, InvalidRequestError
from numba_engine.text.surrogates import lone_surrogate
from numba_engine.text.template_sandbox import LimitedTemplate, RefusedByTemplate

MAX_TEMPLATE_CHARS = 1 << 20
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


class ChatTemplate:
    """A checked, compiled chat template. Any number of threads may render at once.

    Templates come with model files and are not trusted: they run in Jinja's sandbox, with limits on steps and sizes.

    Args:
        source: the template, Jinja as transformers runs it.
        special_tokens: what ``bos_token``, ``eos_token``, … stand for in the template.
        file: where it was read from, for error messages.

    Raises:
        CheckpointError: the template is not valid Jinja, or absurdly long.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, file: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            what = f"chat template of {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are read"
            raise CheckpointError(what, file=file)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = LimitedTemplate(source)
        except jinja2.TemplateSyntaxError as error:
            what = f"chat template is not valid Jinja: line {error.lineno}: {error.message}"
            raise CheckpointError(what, file=file) from None
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            what = f"chat template cannot be compiled: {type(error).__name__}: {error}"
            raise CheckpointError(what, file=file) from None

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
        try:
            return self._template.render(values)
        except RefusedByTemplate as error:
            what = f"the model's chat template refuses them: {error.message}"
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"the model's chat template cannot render them: {type(error).__name__}: {error}"
        except (RecursionError, MemoryError) as error:
            what = f"the model's chat template needs too much to render them: {type(error).__name__}"
        raise InvalidRequestError(FieldViolation("messages", what))


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
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
