"""Chat templates of the kinds that models bring, and conversations for them."""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role not in ('ipython', 'tool') and not 'tool_calls' in message %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{%- set ns = namespace(index=0) %}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token}}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}
"""
MIXED = """\
{% macro turn(role, content) -%}
[{{ role|upper }}]{{ content | replace("<", "&lt;") }}
{%- endmacro %}
{% for message in messages %}
    {% if message.content == "skip" %}
        {% continue %}
    {% endif %}
    {{ turn(message.role, message.content) }}
    {% if message.role == "assistant" %}{% generation %}{{ message.content ~ "|" ~ loop.index ~ loop.length }}{% endgeneration %}{% endif %}
    {% if loop.index > 6 %}{% break %}{% endif %}
{% endfor %}
{{ messages[0] | tojson }}{{ {"é<&>": [1, none]} | tojson(indent=2) }}
{{ messages | map(attribute="role") | join(", ") }}{{ ",".join(["a", "b"]) }}{{ "x".replace("x", "yz") }}
{%- set parts = messages[-1].content.split("\\n") %}{{ parts | length }}{{ "=" * 5 }}{{ undefined_name }}
{{ "2024: %s %d%%" | format("a", 3) }}{{ 12345 | tojson }}{{ "%(year)s 1000" % {"year": 1} }}{{ "{:>7}{x!r}".format("b", x=1) }}{{ "a\nb" | indent(4) }}{{ "%02d" % 5 }}
{{ dict(a=1).items() | list }}{{ range(3) | list }}{{ messages | selectattr("role", "equalto", "user") | list | length }}
"""  # noqa: E501

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "¿Qué tal? 🎉\n\n<b>"}],
    [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "  spaces  "},
        {"role": "user", "content": "a\nb\n<|im_end|>{{ 7 * 7 }}"},
    ],
    [{"role": "user", "content": "skip"}] + [{"role": r, "content": r} for r in ("assistant", "user") * 5],
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "mixed": MIXED}
