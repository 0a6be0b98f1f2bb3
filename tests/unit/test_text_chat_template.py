"""Chat templates against transformers' rendering, and the walls around them."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from baton.core.errors import InvalidConfig, InvalidRequest
from baton.core.types import Message, Tool, ToolCall
from baton.router.prompts import chat_template
from baton.router.prompts.chat_template import MAX_RENDERED, ChatTemplate

CHAT = (
    Message("system", "Be <brief> & 'kind'."),
    Message("user", "¿Qué? 你好 {{ 7 * 7 }}"),
    Message("assistant", "Sí."),
    Message("user", ""),
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "whitespace control": (
        "{{- bos_token }}\n"
        "{%- if messages[0].role == 'system' %}\n"
        "    {%- set system = messages[0]['content'] | trim %}\n"
        "    {%- set messages = messages[1:] %}\n"
        "{%- else %}\n"
        "    {%- set system = '' %}\n"
        "{%- endif %}\n"
        "{{- '[' ~ system ~ ']' }}\n"
        "  {% for message in messages %}\n"
        "    {{ loop.index0 }} {{ message.role }}: {{ message.content }}{{ eos_token }}\n"
        "  {% endfor %}\n"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m.role }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "generation tag": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{% set inner = 1 %}{{ m.content }}{{ inner }}{% endgeneration %}"
        "{{ inner }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools }}{{ documents }}",
    "macros and namespaces": (
        "{% macro show(m) %}<{{ m.role }}>{% endmacro %}{% set ns = namespace(count=0) %}"
        "{% for m in messages %}{% set ns.count = ns.count + 1 %}{{ show(m) }}{% endfor %}"
        "{{ ns.count }}{{ dict(a=1).items() | list }}{{ messages | selectattr('role', 'eq', 'user')"
        " | map(attribute='content') | join('|') }}"
    ),
    "undefined names": "{{ nothing }}{{ pad_token }}{% if tools is defined %}x{% endif %}",
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_template_renders_as_in_transformers(source: str) -> None:
    chat = [{"role": message.role, "content": message.content} for message in CHAT]
    wanted, _ = render_jinja_template(
        [chat], chat_template=source, add_generation_prompt=True, **SPECIAL
    )
    assert ChatTemplate(source, SPECIAL).render(CHAT) == wanted[0]


def test_strftime_now_is_the_local_date() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(CHAT)
    assert abs(int(rendered) - datetime.now().year) <= 1


def test_a_template_that_refuses_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages[9]['role'] }}",
        "{{ '%d' % 'x' }}",
        "{% macro endless() %}{{ endless() }}{% endmacro %}{{ endless() }}",
        "{{ messages.nothing() }}",
    ],
)
def test_a_failing_template_is_the_requests_fault(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        ChatTemplate(source, {}).render(CHAT)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 1", "{{ x | no_such_filter }}"])
def test_a_broken_template_is_found_when_it_is_loaded(source: str) -> None:
    with pytest.raises(InvalidConfig, match="template is broken"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace.__init__.__globals__.keys() }}",
        "{{ (messages[0] | attr('__class__')).__base__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set ns = namespace() %}{% set ns._Namespace__attrs = 1 %}",
        "{{ namespace(__class__=1) }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(CHAT)


def test_a_template_cannot_loop_without_bounds() -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate("{% for i in range(10 ** 12) %}{% endfor %}", {}).render(CHAT)


def test_a_template_cannot_write_without_bounds() -> None:
    source = (
        "{% set block = 'x' * 100000 %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ block }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match=str(MAX_RENDERED)):
        ChatTemplate(source, {}).render(CHAT)


ENDLESS = {
    "a loop in a loop": "{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2,
    "loops over the messages": "{% for a in messages %}" * 9 + "{% endfor %}" * 9,
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_has_so_much_time(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.1)
    template = ChatTemplate(ENDLESS[case], {})
    with pytest.raises(InvalidRequest, match=r"longer than 0\.1 seconds"):
        template.render([Message("user", "x")] * 20)
    assert (
        ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}).render(
            [Message("user", "x")] * 20
        )
        == "x" * 20
    )


@pytest.mark.parametrize(
    "expression", ["'x' * 10 ** 9", "10 ** 9 * 'x'", "[1] * 99999999", "9 ** 99"]
)
def test_a_template_makes_nothing_enormous_at_once(expression: str) -> None:
    with pytest.raises(InvalidRequest, match="too l"):
        ChatTemplate("{{ " + expression + " }}", {}).render([Message("user", "x")])


@pytest.mark.parametrize("expression", ["1 // 0", "range(1, 2, 3, 4)", "messages[0] + 1"])
def test_pythons_own_words_are_not_told(expression: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate("{{ " + expression + " }}", {}).render([Message("user", "x")])
    assert refused.value.message == "the model's chat template refuses the messages"


WITH_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if 'tool_calls' in m %}{% for call in m.tool_calls %}"
    "{{ call.id }}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}{% endif %}"
    "{{ m.tool_call_id }}{{ m.name }}{{ m.reasoning_content }};{% endfor %}"
)


def test_tools_calls_and_results_are_given_as_transformers_gives_them() -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    function = {"name": "f", "description": "does", "parameters": parameters}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    (expected,), _ = render_jinja_template(
        conversations=[
            [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "c", "name": "f"},
                {"role": "assistant", "content": "2.", "reasoning_content": "so"},
            ]
        ],
        tools=[{"type": "function", "function": function}],
        chat_template=WITH_TOOLS,
        add_generation_prompt=True,
    )
    messages = [
        Message("user", "hi"),
        Message("assistant", "", (ToolCall("c", "f", '{"x": 1}'),)),
        Message("tool", "2", tool_call_id="c", name="f"),
        Message("assistant", "2.", reasoning="so"),
    ]
    tools = [Tool("f", "does", json.dumps(parameters))]
    assert ChatTemplate(WITH_TOOLS, {}).render(messages, tools) == expected
