"""Chat templates against transformers' rendering, and the walls around them."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from baton.core.errors import InvalidConfig, InvalidRequest
from baton.core.types import ChatPrompt, Message, Tool, ToolCall
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
    assert ChatTemplate(source, SPECIAL).render(ChatPrompt(CHAT)) == wanted[0]


PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% else %}<image>{% endif %}{% endfor %};{% endfor %}"
)


def test_text_reaches_a_template_that_shows_lists_of_parts_alone() -> None:
    chat = [
        {"role": each.role, "content": [{"type": "text", "text": each.content}]} for each in CHAT
    ]
    wanted, _ = render_jinja_template([chat], chat_template=PARTS)
    assert ChatTemplate(PARTS, {}).render(ChatPrompt(CHAT, end="closed")) == wanted[0]
    both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    both += "parts{{ m.content[0]['type'] }}{% endif %}{% endfor %}"
    assert "parts" not in ChatTemplate(both, {}).render(ChatPrompt(CHAT))


def test_strftime_now_is_the_local_date() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(ChatPrompt(CHAT))
    assert abs(int(rendered) - datetime.now().year) <= 1


def test_a_template_that_refuses_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render(ChatPrompt(CHAT))


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
        ChatTemplate(source, {}).render(ChatPrompt(CHAT))


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
        ChatTemplate(source, {}).render(ChatPrompt(CHAT))


def test_a_template_cannot_loop_without_bounds() -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate("{% for i in range(10 ** 12) %}{% endfor %}", {}).render(ChatPrompt(CHAT))


def test_a_template_cannot_write_without_bounds() -> None:
    source = (
        "{% set block = 'x' * 100000 %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ block }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match=str(MAX_RENDERED)):
        ChatTemplate(source, {}).render(ChatPrompt(CHAT))


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
        template.render(ChatPrompt((Message("user", "x"),) * 20))
    assert (
        ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}).render(
            ChatPrompt((Message("user", "x"),) * 20)
        )
        == "x" * 20
    )


@pytest.mark.parametrize(
    "expression", ["'x' * 10 ** 9", "10 ** 9 * 'x'", "[1] * 99999999", "9 ** 99"]
)
def test_a_template_makes_nothing_enormous_at_once(expression: str) -> None:
    with pytest.raises(InvalidRequest, match="too l"):
        ChatTemplate("{{ " + expression + " }}", {}).render(ChatPrompt((Message("user", "x"),)))


@pytest.mark.parametrize("expression", ["1 // 0", "range(1, 2, 3, 4)", "messages[0] + 1"])
def test_pythons_own_words_are_not_told(expression: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate("{{ " + expression + " }}", {}).render(ChatPrompt((Message("user", "x"),)))
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
    assert (
        ChatTemplate(WITH_TOOLS, {}).render(ChatPrompt(tuple(messages), tuple(tools))) == expected
    )


# As gpt-oss's: channels, types of tools by a macro that calls itself, calls after their analysis.
HARMONY = """\
{%- macro type_of(spec) -%}
    {%- if spec.type == "array" -%}
        {{- type_of(spec["items"]) + "[]" }}
    {%- elif spec.enum -%}
        {{- '"' + spec.enum | join('" | "') + '"' -}}
    {%- else -%}
        {{- spec.type if spec.type is string else spec.type | join(" | ") }}
    {%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y") + "\\n\\nReasoning: " }}
{{- (reasoning_effort if reasoning_effort is defined else "medium") + "<|end|>" }}
{%- set developer = messages[0].role in ("developer", "system") %}
{%- set turns = messages[1:] if developer else messages %}
{%- if developer or tools %}
    {{- "<|start|>developer<|message|>" + (messages[0].content if developer else "") }}
    {%- for tool in tools or [] %}
        {%- for name, spec in tool.function.parameters.properties.items() %}
            {{- "\\n" + tool.function.name + "." + name + ": " + type_of(spec) }}
        {%- endfor %}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for turn in turns %}
    {%- if turn.role == "assistant" and "tool_calls" in turn %}
        {%- set later = namespace(final=false) %}
        {%- for other in turns[loop.index:] if other.role == "assistant" %}
            {%- set later.final = true %}
        {%- endfor %}
        {%- if turn.content and not later.final %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + turn.content + "<|end|>" }}
        {%- endif %}
        {%- set call = turn.tool_calls[0].function %}
        {%- set last.name = call.name %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json" }}
        {{- "<|message|>" + call.arguments | tojson + "<|call|>" }}
    {%- elif turn.role == "assistant" %}
        {%- if "<|channel|>" in turn.content %}{{- raise_exception("no channels here") }}{% endif %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + turn.content + "<|end|>" }}
    {%- elif turn.role == "tool" %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- turn.content | tojson + "<|end|>" }}
    {%- else %}
        {{- "<|start|>user<|message|>" + turn.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{% endif %}"""


def test_a_chat_in_channels_renders_as_in_transformers() -> None:
    kinds = {"unit": {"type": "string", "enum": ["c", "f"]}, "at": {"type": ["string", "null"]}}
    kinds["days"] = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    tool = Tool("weather", "looks", json.dumps({"type": "object", "properties": kinds}))
    messages = [
        Message("developer", "Be brief."),
        Message("user", "Hi"),
        Message("assistant", "Hello."),
        Message("user", "Weather?"),
        Message("assistant", "I look.", (ToolCall("1", "weather", '{"unit": "c"}'),)),
        Message("tool", '{"sun": true}', tool_call_id="1", name="weather"),
    ]
    function = {"name": "weather", "arguments": {"unit": "c"}}
    given: list[dict[str, object]] = [
        {"role": each.role, "content": each.content} for each in messages
    ]
    given[4]["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    described = {
        "name": "weather",
        "description": "looks",
        "parameters": json.loads(tool.parameters),
    }
    (expected,), _ = render_jinja_template(
        conversations=[given],
        tools=[{"type": "function", "function": described}],
        chat_template=HARMONY,
        add_generation_prompt=True,
    )
    found = ChatTemplate(HARMONY, {}).render(ChatPrompt(tuple(messages), (tool,)))
    assert found == expected
    assert "<|channel|>analysis<|message|>I look.<|end|>" in found
    assert found.endswith("<|start|>assistant")
    with pytest.raises(InvalidRequest, match="no channels here"):
        ChatTemplate(HARMONY, {}).render(ChatPrompt((Message("assistant", "<|channel|>final"),)))


ENDINGS = TEMPLATES["whitespace control"].replace("    {{ loop", "{{ loop")


@pytest.mark.parametrize("source", [TEMPLATES[next(iter(TEMPLATES))], ENDINGS])
@pytest.mark.parametrize("last", [Message("assistant", "Paris is "), Message("user", "é")])
def test_the_last_message_is_continued_as_in_transformers(source: str, last: Message) -> None:
    chat = [{"role": message.role, "content": message.content} for message in (*CHAT, last)]
    wanted, _ = render_jinja_template(
        [chat], chat_template=source, continue_final_message=True, **SPECIAL
    )
    continued = ChatPrompt((*CHAT, last), end="continued")
    assert ChatTemplate(source, SPECIAL).render(continued) == wanted[0]
    assert wanted[0].endswith(last.content)


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        ChatTemplate("nothing", {}).render(ChatPrompt(CHAT, end="continued"))


def test_a_template_sees_the_callers_arguments() -> None:
    source = "{{ enable_thinking }}{{ bos_token }}{% if add_generation_prompt %}open{% endif %}"
    kwargs = '{"enable_thinking": false, "bos_token": "theirs", "self": 1}'
    template = ChatTemplate(source, SPECIAL)
    begin = f"False{SPECIAL['bos_token']}"
    assert template.render(ChatPrompt(CHAT, template_kwargs=kwargs)) == begin + "open"
    assert template.render(ChatPrompt(CHAT, template_kwargs=kwargs, end="closed")) == begin
