"""Round trips: a call that a chat template renders is parsed back to the same call.

The templates are short ones that write calls as the published templates of these models do.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import pytest

from baton.core.errors import InvalidGrammar
from baton.core.types import ChatPrompt, Message, Tool, ToolCall, ToolFormatName
from baton.router.answers.answer import splitter_for
from baton.router.answers.answer_events import AnswerDelta, merge_deltas
from baton.router.answers.answer_format import AnswerFormat, answer_format
from baton.router.answers.tool_call_splitter import ToolCallSplitter
from baton.router.answers.tool_formats import FORMATS
from baton.router.prompts.chat_template import ChatTemplate
from baton.router.prompts.output_grammar import grammar_of

TOOLS = (
    Tool(
        "get_weather",
        parameters=json.dumps(
            {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "wind": {"type": "boolean"},
                    "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "at": {"$ref": "#/$defs/Point"},
                },
                "required": ["city"],
                "$defs": {"Point": {"type": "object"}},
            }
        ),
    ),
    Tool("list-files", parameters='{"type": "object"}'),
)

WEATHER = {
    "city": 'Pa<ris\n"é"</para </arg_',
    "days": 3,
    "wind": True,
    "units": None,
    "at": {"x": [1.5, "a"]},
}

QWEN3_CODER = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{{- value | tojson if value is mapping or (value is sequence and value is not string)
    else value | string }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}<|im_end|>
{% endfor %}"""

GLM_45 = """{%- for message in messages %}<|{{ message.role }}|>
{{- '\\n<think>' + message.reasoning_content + '</think>' if message.reasoning_content }}
{{- '\\n' + message.content if message.content }}
{%- for call in message.tool_calls or [] %}
{{ '\\n<tool_call>' + call.function.name }}
{% for key, value in call.function.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value | tojson if value is not string else value }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{%- endfor %}"""

GLM_47 = """{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name -}}
{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key><arg_value>
{{- value | tojson if value is not string else value }}</arg_value>{% endfor %}</tool_call>
{%- endfor %}{%- endfor %}"""

DEEPSEEK_V3 = """{%- for message in messages %}<｜{{ message.role }}｜>{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n' }}
{{- '```json' + '\\n' + call.function.arguments | tojson + '\\n' + '```' }}
{{- '<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' if loop.last }}{%- endfor %}<｜end▁of▁sentence｜>
{%- endfor %}"""

DEEPSEEK_V31 = """{%- for message in messages %}<｜{{ message.role }}｜></think>
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first }}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
{{- call.function.arguments | tojson + '<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' if loop.last }}{%- endfor %}<｜end▁of▁sentence｜>
{%- endfor %}"""

KIMI = """{%- for message in messages %}<|im_{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<|tool_calls_section_begin|>' if loop.first }}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{{- call.function.arguments | tojson + '<|tool_call_end|>' }}
{{- '<|tool_calls_section_end|>' if loop.last }}{%- endfor %}<|im_end|>
{%- endfor %}"""

HARMONY = """{%- for message in messages %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}{%- if message.content %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endif %}{%- for call in message.tool_calls or [] %}
{{- '<|start|>assistant to=functions.' + call.function.name + '<|channel|>commentary ' }}
{{- 'json<|message|>' + call.function.arguments | tojson + '<|call|>' }}
{%- endfor %}{%- endfor %}"""

_GEMMA = """{%%- macro written(value) %%}
{%%- if value is string %%}{{ '%(quote)s' + value + '%(quote)s' }}
{%%- elif value is boolean or value is none %%}{{ value | tojson }}
{%%- elif value is mapping %%}{{ '{' }}{%% for key, each in value | items %%}
{{- key + ':' + written(each) }}{{ ',' if not loop.last }}{%% endfor %%}{{ '}' }}
{%%- elif value is sequence %%}[{%% for each in value %%}
{{- written(each) }}{{ ',' if not loop.last }}
{%%- endfor %%}]{%%- else %%}{{ value }}{%%- endif %%}{%%- endmacro %%}
{%%- for message in messages %%}<|turn>{{ message.role }}
{{ message.content }}
{%%- for call in message.tool_calls or [] %%}
{{- '%(begin)scall:' + call.function.name + written(call.function.arguments) + '%(end)s' }}
{%%- endfor %%}<turn|>
{%% endfor %%}"""
GEMMA = _GEMMA % {"quote": '<|"|>', "begin": "<|tool_call>", "end": "<tool_call|>"}
FUNCTION_GEMMA = _GEMMA % {
    "quote": "<escape>",
    "begin": "<start_function_call>",
    "end": "<end_function_call>",
}

HERMES = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% endfor %}"""


class Published(NamedTuple):
    form: str
    template: str
    begin: str  # before an answer
    end: str  # after it


PUBLISHED = {
    "Qwen3-Coder": Published("qwen3-coder", QWEN3_CODER, "<|im_start|>assistant\n", "<|im_end|>\n"),
    "GLM 4.5": Published("glm", GLM_45, "<|assistant|>", ""),
    "GLM 4.7": Published("glm", GLM_47, "<|assistant|>", ""),
    "DeepSeek R1": Published(
        "deepseek-v3", DEEPSEEK_V3, "<｜assistant｜>", "<｜end▁of▁sentence｜>"
    ),
    "DeepSeek V3.1": Published(
        "deepseek-v3.1", DEEPSEEK_V31, "<｜assistant｜></think>", "<｜end▁of▁sentence｜>"
    ),
    "Kimi K2": Published("kimi", KIMI, "<|im_assistant|>", "<|im_end|>"),
    "Gemma 4": Published("gemma", GEMMA, "<|turn>assistant\n", "<turn|>\n"),
    "FunctionGemma": Published("functiongemma", FUNCTION_GEMMA, "<|turn>assistant\n", "<turn|>\n"),
    "gpt-oss": Published("harmony", HARMONY, "<|start|>assistant", "<|call|>"),
    "Hermes": Published("hermes", HERMES, "<|im_start|>assistant\n", "<|im_end|>\n"),
}

models = pytest.mark.parametrize("model", PUBLISHED.values(), ids=PUBLISHED)


def answered(model: Published, *calls: ToolCall, content: str = "") -> str:
    """An answer with the calls, as the template shows it in a conversation."""
    chat = ChatPrompt((Message("assistant", content, calls),), TOOLS, end="closed")
    rendered = ChatTemplate(model.template, {}).render(chat)
    assert rendered.startswith(model.begin)
    assert rendered.endswith(model.end)
    return rendered.removeprefix(model.begin).removesuffix(model.end)


def parsed(model: Published, pieces: list[str]) -> AnswerDelta:
    ids = iter(f"call-{number}" for number in range(9))
    form = answer_format(model.template, "auto", "auto")
    chat = ChatPrompt((), TOOLS)
    splitter = splitter_for(form, chat, thinking=False, new_id=lambda: next(ids))
    deltas = [AnswerDelta("", []) for _ in range(len(pieces) + 1)]
    for piece, delta in zip(pieces, deltas, strict=False):
        splitter.push(piece, delta)
        assert len({call.index for call in delta.tool_calls}) == len(delta.tool_calls)
    splitter.flush(deltas[-1])
    return merge_deltas(deltas, 0)


def cuts(text: str) -> Iterator[list[str]]:
    """In two at every place, and character by character."""
    yield from ([text[:place], text[place:]] for place in range(len(text) + 1))
    yield list(text)


def calls_of(delta: AnswerDelta) -> list[tuple[str, str, Any]]:
    return [(call.id, call.name, json.loads(call.arguments)) for call in delta.tool_calls]


@models
def test_a_template_shows_its_format(model: Published) -> None:
    assert answer_format(model.template, "auto", "auto").tools is FORMATS[model.form]


def test_every_format_can_be_configured() -> None:
    assert sorted(get_args(ToolFormatName)) == sorted(["auto", *FORMATS])


@models
def test_rendered_calls_are_parsed_back_however_the_text_is_cut(model: Published) -> None:
    ids = ("functions.get_weather:0", "functions.list-files:1")
    text = answered(
        model,
        ToolCall(ids[0], "get_weather", json.dumps(WEATHER)),
        ToolCall(ids[1], "list-files", "{}"),
    )
    expected = ids if model.form == "kimi" else ("call-0", "call-1")
    for pieces in cuts(text):
        delta = parsed(model, pieces)
        assert calls_of(delta) == [
            (expected[0], "get_weather", WEATHER),
            (expected[1], "list-files", {}),
        ], pieces
        assert delta.text.strip() == "", pieces


@models
def test_content_before_calls_stays(model: Published) -> None:
    call = ToolCall("functions.list-files:0", "list-files", '{"all": "yes"}')
    for pieces in cuts(answered(model, call, content="I look.")):
        delta = parsed(model, pieces)
        assert delta.text.strip() == "I look."
        assert [each[2] for each in calls_of(delta)] == [{"all": "yes"}]


@models
def test_a_call_of_an_unknown_tool_is_content(model: Published) -> None:
    text = answered(model, ToolCall("functions.rm:0", "rm", '{"path": "/"}'))
    for pieces in cuts(text):
        delta = parsed(model, pieces)
        assert not delta.tool_calls
        assert "/" in delta.text


@models
def test_the_text_of_an_argument_streams(model: Published) -> None:
    call = ToolCall("functions.get_weather:0", "get_weather", '{"city": "Paris"}')
    begun = answered(model, call).partition("ris")[0]
    (delta,) = parsed(model, [begun]).tool_calls
    assert delta.arguments.replace(" ", "") == '{"city":"Pa'


def test_reasoning_comes_before_calls() -> None:
    model = PUBLISHED["GLM 4.5"]
    call = answered(model, ToolCall("", "list-files", "{}"))
    delta = parsed(model, [f"\n<think>So.</think>{call}"])
    assert delta.reasoning == "So."
    assert [each[1] for each in calls_of(delta)] == ["list-files"]


LOOSE = {
    '{"text": "a \\" b}"}': {"text": 'a " b}'},
    "{ a : [ 1 , -2.5 , {} ] , b : true }": {"a": [1, -2.5, {}], "b": True},
    '{city:New York,none:None,<|"|>a b<|"|>:<|"|><|"|>}': {
        "city": "New York",
        "none": None,
        "a b": "",
    },
    '{a:<|"|>{,]<|<|"|>}': {"a": "{,]<|"},
}


@pytest.mark.parametrize("text", LOOSE)
def test_loose_json_is_read_as_it_is_meant(text: str) -> None:
    for pieces in cuts(f"<|tool_call>call:list-files{text}<tool_call|>"):
        (call,) = calls_of(parsed(PUBLISHED["Gemma 4"], pieces))
        assert call[2] == LOOSE[text], pieces


HEADER = "<|channel|>commentary to=functions.list-files <|constrain|>json<|message|>"
MESSAGES = {
    "a call": (f"{HEADER}{{}}<|call|>", "", "", ["{}"]),
    "reasoning twice, and a preamble": (
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>analysis<|message|> Hm.<|end|>"
        f"<|start|>assistant{HEADER}{{}}<|call|>",
        "So. Hm.",
        "I look.",
        ["{}"],
    ),
    "no end": (
        "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b < c",
        "a",
        "b < c",
        [],
    ),
    "a message that goes on": ("and so on.<|return|>", "", "and so on.", []),
    "half a header": ("<|channel|>fin", "", "", []),
    "cut off": (f'{HEADER}{{"a', "", "", ['{"a']),
    "a tool of the server's": (
        "<|channel|>analysis to=python code<|message|>1 + 1<|call|>",
        "1 + 1",
        "",
        [],
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_messages_are_split_however_the_text_is_cut(case: str) -> None:
    text, reasoning, content, arguments = MESSAGES[case]
    for pieces in cuts(text):
        delta = parsed(PUBLISHED["gpt-oss"], pieces)
        found = [call.arguments for call in delta.tool_calls]
        assert (delta.reasoning, delta.text, found) == (reasoning, content, arguments), pieces


def test_a_template_gets_the_reasoning_under_its_own_name() -> None:
    call = ToolCall("", "list-files", "{}")
    thought = Message("assistant", "", (call,), reasoning="So.")
    both = Message("assistant", "I look.", (call,), reasoning="So.")
    template = ChatTemplate(HARMONY, {})
    assert "analysis<|message|>So.<|end|>" in template.render(ChatPrompt((thought,)))
    assert "analysis" not in template.render(ChatPrompt((both,)))


VALUES = [
    ({"type": "string"}, "5", "5"),
    ({"type": "integer"}, "5", 5),
    ({"type": "number"}, "5", 5),
    ({"type": "boolean"}, "False", False),
    ({"type": ["integer", "null"]}, "None", None),
    ({"type": ["integer", "string"]}, "5a", "5a"),
    ({"type": ["array", "string"]}, "5", "5"),
    ({"type": "array"}, '[1, "a"]', [1, "a"]),
    ({"type": "integer"}, "many", "many"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({}, '{"a": 1}', {"a": 1}),
    ({}, "NaN", "NaN"),
    ({}, "[" * 100_000, "[" * 100_000),
    ({"type": {"no": "type"}}, "a", "a"),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
@pytest.mark.parametrize("name", ["Qwen3-Coder", "GLM 4.7"])
def test_a_value_has_the_type_that_the_schema_wants(
    name: str, schema: dict[str, object], text: str, value: object
) -> None:
    model = PUBLISHED[name]
    rendered = answered(model, ToolCall("", "typed", json.dumps({"value": text})))
    tool = Tool("typed", parameters=json.dumps({"properties": {"value": schema}}))
    form = answer_format(model.template, "auto", "auto")
    splitter = splitter_for(form, ChatPrompt((), (tool,)), thinking=False, new_id=lambda: "id")
    delta = AnswerDelta("", [])
    splitter.push(rendered, delta)
    assert [json.loads(call.arguments) for call in delta.tool_calls] == [{"value": value}]


UNCHECKED: list[dict[str, Any]] = [
    {"properties": 5},
    {"properties": {"value": True}},
    {"properties": {"value": {"type": "string", "maxLength": "5", "minLength": None}}},
    {"properties": {"value": {"type": "string", "maxLength": 2, "minLength": 5}}},
    {"properties": {"value": {"enum": 5}}},
    {"properties": {"value": {"enum": [1, "a", None]}}, "required": 5},
    {"properties": {"value": {"anyOf": 7}}},
    {"properties": {"value": {"$ref": "#/no/where"}}},
]


@pytest.mark.parametrize("schema", UNCHECKED)
@pytest.mark.parametrize("form", FORMATS)
def test_a_schema_that_is_none_is_followed_or_refused(form: str, schema: dict[str, Any]) -> None:
    chat = ChatPrompt((), (Tool("typed", parameters=json.dumps(schema)),), must_call=True)
    structure = AnswerFormat(FORMATS[form], reasoning=False).forced_call(chat, lambda mark: None)
    with contextlib.suppress(InvalidGrammar):
        assert grammar_of(structure)
    text = "<tool_call><function=typed><parameter=value>a</parameter></function></tool_call>"
    splitter = ToolCallSplitter(FORMATS["qwen3-coder"], chat.tools)
    delta = AnswerDelta("", [])
    splitter.push(text, delta)
    assert [json.loads(call.arguments) for call in delta.tool_calls] == [{"value": "a"}]
