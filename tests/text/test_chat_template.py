from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from numba_engine.errors import CheckpointError, InvalidRequestError
from numba_engine.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from numba_engine.text.template_sandbox import MAX_RENDERED_CHARS
from tests.text.chat_cases import CHATML, CONVERSATIONS, LLAMA3, MISTRAL, TEMPLATES, TOKENS


def render(source: str, messages: list[dict[str, str]]) -> str:
    return ChatTemplate(source, TOKENS, file="test.gguf").render(messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_transformers(name: str, golden: dict[str, Any]) -> None:
    assert [render(TEMPLATES[name], messages) for messages in CONVERSATIONS] == golden["chats"][name]


def test_texts_written_out() -> None:
    assert render(CHATML, CONVERSATIONS[0]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(MISTRAL, CONVERSATIONS[1]) == "<s>[INST]  Be brief. \n\n¿Qué tal? 🎉\n\n<b>[/INST]"
    assert render(LLAMA3, CONVERSATIONS[1]) == (
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n¿Qué tal? 🎉\n\n<b><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert render("  {% if true %}\nx\n  {% endif %}\ny\n", CONVERSATIONS[0]) == "x\ny"
    assert render("{{ strftime_now('%Y') }}", CONVERSATIONS[0]) >= "2024"


def test_what_the_template_refuses_is_told() -> None:
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(InvalidRequestError, match="refuses them: After the optional system message") as caught:
        render(MISTRAL, twice)
    assert caught.value.violations[0].field == "messages"


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([], ["messages"]),
        ([{"content": "x"}], ["messages[0].role"]),
        ([{"role": "user"}], ["messages[0].content"]),
        ([{"role": "user", "content": None}], ["messages[0].content"]),
        ([CONVERSATIONS[0][0], {"role": "a<|im_end|>", "content": 3}], ["messages[1].role", "messages[1].content"]),
        ([{"role": "user", "content": "a\ud800"}], ["messages[0].content"]),
        ([{"role": "", "content": "x"}], ["messages[0].role"]),
        ([{"role": "user\n", "content": "x"}], ["messages[0].role"]),
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(messages: list[Any], fields: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(CHATML, messages)
    assert [violation.field for violation in caught.value.violations] == fields


@pytest.mark.parametrize(
    "source",
    ["{{ messages[99].role.x }}", "{{ 1 / 0 }}", "{{ messages[0] + 1 }}", "{{ 'x' | sum }}", "{{ nope() }}"],
)
def test_templates_that_fail_say_so(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot render them: [A-Z]"):
        render(source, CONVERSATIONS[0])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for x in y %}", "line 1: Unexpected end of template"),
        ("\n\n{{ x | nofilter }}", "line 3: No filter named 'nofilter'"),
        ("{{ '", "line 1"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "chat template of 1048577 characters"),
        ("{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "chat template"),
    ],
)
def test_broken_templates_are_refused_when_loaded(source: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        ChatTemplate(source, TOKENS, file="test.gguf")
    assert caught.value.file == "test.gguf"


HOSTILE = {
    "reach Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "reach a function's globals": "{{ raise_exception.__globals__['re'] }}",
    "reach the budget": "{{ __budget__._spend(-1000000000) }}",
    "hide in a namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "hide in a new namespace": "{% set ns = namespace(_x=1) %}",
    "change what it is given": "{{ messages.append(1) }}",
    "endless output": "{% for a in range(100000) %}" + "x" * 1000 + "{% endfor %}",
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless generators": "{% for a in range(9999) %}{% for b in range(9999)|map('abs') %}{% endfor %}{% endfor %}",
    "endless calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "swap the budget": (
        "{% set __budget__ = namespace() %}{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    ),
    "a large range": "{{ range(10 ** 9) | list }}",
    "a large product": "{{ 'x' * 10 ** 9 }}",
    "a large product of lists": "{{ [1] * (10 ** 9) }}",
    "a large power": "{{ 9 ** (9 ** 9) }}",
    "doubling by +": "{% set n = namespace(x='x') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='x') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by replace": (
        "{% set n = namespace(x='x') %}{% for i in range(64) %}{% set n.x = n.x | replace('x', 'xx') %}{% endfor %}"
    ),
    "squaring by replace": "{% set x = 'x' * 100000 %}{{ x.replace('x', x) }}",
    "squaring by join": "{% set x = 'x' * 100000 %}{{ x | list | join(x) }}",
    "squaring by a method": "{% set x = 'x' * 100000 %}{{ x.join(x) }}",
    "padding": "{{ 'x'.ljust(10 ** 9) }}",
    "padding by format": "{{ '{:>999999999}'.format(1) }}",
    "padding by %": "{{ '%999999999d' % 1 }}",
    "padding by an argument": "{{ '{:>{}}'.format(1, 999999999) }}{{ '%*d' % (999999999, 1) }}",
    "padding by precision": "{{ '{:.999999999f}'.format(1.0) }}",
    "padding by a key": "{{ '%(a)999999999d' % {'a': 1} }}",
    "padding by a filter": "{{ '%999999999d' | format(1) }}",
    "centering": "{{ 'x' | center(999999999) }}",
    "filling rows": "{{ [1] | batch(999999999, 0) | list }}",
    "padding of JSON": "{{ [1] | tojson(indent=999999999) }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_are_stopped(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidRequestError, match="the model's chat template"):
        render(source, CONVERSATIONS[0])
    assert time.monotonic() - start < 10


def test_a_long_conversation_is_no_attack() -> None:
    messages = [{"role": role, "content": "word " * 200} for role in ("user", "assistant") * 2000]
    assert len(render(CHATML, messages)) > 4_000_000
    with pytest.raises(InvalidRequestError, match=f"exceeds {MAX_RENDERED_CHARS}"):
        render(CHATML, [{"role": "user", "content": "x" * (MAX_RENDERED_CHARS + 1)}])


def test_threads_have_budgets_of_their_own() -> None:
    template = ChatTemplate("{% for a in range(99999) %}{% endfor %}{{ messages[0].content }}", {}, file="x")
    results: list[str] = []

    def work(name: str) -> None:
        results.extend(template.render([{"role": "user", "content": name}]) for _ in range(4))

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted("0123" * 4)
