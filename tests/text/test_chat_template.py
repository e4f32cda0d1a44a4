from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from numba_engine.errors import InvalidRequestError
from numba_engine.text import chat_template
from numba_engine.text.chat_template import ChatTemplate
from numba_engine.text.template_worker import MAX_RENDERED_CHARS
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
        ("{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}", "line 1: unexpected '.'"),
        ("{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "chat template"),
    ],
)
def test_broken_templates_refuse_chats_and_say_why(source: str, message: str) -> None:
    template = ChatTemplate(source, TOKENS, file="test.gguf")
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            template.render(CONVERSATIONS[0])
        assert caught.value.violations[0].field == "messages"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("""{{ '{{"role": "{}"}}'.format(messages[0].role) }}""", '{"role": "user"}'),
        ("{{ messages[0].role.ljust(12) }}|", "user        |"),
        ("{{ '%5d|%-4s|' % (42, 'a') }}{{ '{:>{}}'.format(1, 4) }}", "   42|a   |   1"),
        ("{{ 'x' | center(9) }}{{ [1, 2, 3] | batch(2, 0) | list }}", "    x    [[1, 2], [3, 0]]"),
        ("{% for i in range(3) %}{{ 'ab' * i }}{{ loop.index }}{% endfor %}", "1ab2abab3"),
        ("{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %}{{ n.x }}{{ dict(a=1) | tojson(indent=1) }}",
         '2{\n "a": 1\n}'),
    ],
)  # fmt: skip
def test_what_plain_jinja_renders_renders(source: str, text: str) -> None:
    assert render(source, [{"role": "user", "content": "x"}]) == text


HOSTILE = {
    "reach Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "reach a function's globals": "{{ raise_exception.__globals__['re'] }}",
    "change what it is given": "{{ messages.append(1) }}",
    "endless output": "{% for a in range(100000) %}" + "x" * 1000 + "{% endfor %}",
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless generators": "{% for a in range(9999) %}{% for b in range(9999)|map('abs') %}{% endfor %}{% endfor %}",
    "endless calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a large range": "{{ range(10 ** 9) | list }}",
    "a large product": "{{ 'x' * 10 ** 9 }}",
    "a large product of lists": "{{ [1] * (10 ** 9) }}",
    "a large power": "{{ (messages | length + 8) ** (9 ** 9) }}",
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
    "squaring integers": "{% set n = namespace(x=7) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "nested lists printed": (
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"
    ),
    "hoarded strings": (
        "{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = n.x + [('x' * 999999) ~ i] %}{% endfor %}"
    ),
    "digits of a float": "{{ 1.5 | round(99999999) }}{{ messages | length + 9 ** (messages | length * 999999999) }}",
    "wrapping a text": "{{ ('x ' * (messages | length * 5000000)) | wordwrap(1) }}",
    "sorting in loops": "{% for i in range(99999) %}{% set x = range(99999) | list | sort %}{% endfor %}",
    "upper case in loops": "{% set x = 'x' * 9999999 %}{% for i in range(99999) %}{% set y = x.upper() %}{% endfor %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 0.5)
    template = ChatTemplate("{% if messages[0].content == 'attack' %}" + source + "{% endif %}ok", TOKENS, file="x")
    start = time.monotonic()
    with pytest.raises(InvalidRequestError, match="the model's chat template"):
        template.render([{"role": "user", "content": "attack"}])
    assert time.monotonic() - start < 20
    assert template.render([{"role": "user", "content": "peace"}]) == "ok", "the next chat finds a worker"


def test_a_constant_that_takes_for_ever_refuses_chats() -> None:
    """Jinja computes it while it compiles; the worker's own limit ends it, whether anybody waits or not."""
    template = ChatTemplate("{{ 9 ** (9 ** 9) }}", TOKENS, file="x")
    assert template._worker is not None
    assert template._worker._process.wait(100) != 0
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        template.render(CONVERSATIONS[0])


def test_a_long_conversation_is_no_attack() -> None:
    messages = [{"role": role, "content": "word " * 200} for role in ("user", "assistant") * 2000]
    assert len(render(CHATML, messages)) > 4_000_000
    with pytest.raises(InvalidRequestError, match=f"exceeds {MAX_RENDERED_CHARS}"):
        render(CHATML, [{"role": "user", "content": "x" * (MAX_RENDERED_CHARS + 1)}])


def test_threads_take_turns_and_get_their_own_text() -> None:
    template = ChatTemplate("{% for a in range(999) %}{% endfor %}{{ messages[0].content }}", {}, file="x")
    results: list[bool] = []

    def work(name: str) -> None:
        results.extend(template.render([{"role": "user", "content": name}]) == name for _ in range(4))

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 16


def test_a_worker_that_is_killed_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, file="x")
    for content in ("a", "b\u2028\n", "\x00"):
        assert template.render([{"role": "user", "content": content}]) == content
    assert template._worker is not None
    template._worker._process.kill()
    template._worker._process.wait()
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        template.render([{"role": "user", "content": "a"}])
    assert template.render([{"role": "user", "content": "c"}]) == "c"


def test_workers_end_with_their_templates() -> None:
    template = ChatTemplate("x", {}, file="x")
    assert template._worker is not None
    process = template._worker._process
    del template
    gc.collect()
    assert process.poll() is not None


def test_workers_import_jinja_and_no_part_of_the_engine() -> None:
    probe = "import sys, runpy; runpy.run_path(sys.argv[1]); print([m for m in sys.modules if m.startswith('num')])"
    worker = chat_template._WORKER
    result = subprocess.run(
        [sys.executable, "-P", "-c", probe, str(worker)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "['numbers']"
