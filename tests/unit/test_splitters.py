"""Tool calls and thoughts in the formats that models write, however the text is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.core.types import Tool
from baton.router.answers.answer_events import AnswerDelta, ToolCallDelta
from baton.router.answers.answer_format import REASONING_MARKERS, ReasoningMarkers, answer_format
from baton.router.answers.splitters import ContentSplitter, ReasoningSplitter, Splitter
from baton.router.answers.tool_call_splitter import ToolCallSplitter
from baton.router.answers.tool_formats import (
    FORMATS,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    ToolFormat,
    tool_format_of,
)

TOOLS = [Tool("get_weather"), Tool("add")]

Calls = list[tuple[str, str]]


def push(splitter: Splitter, text: str) -> AnswerDelta:
    delta = AnswerDelta("", [])
    splitter.push(text, delta)
    return delta


def run(splitter: Splitter, pieces: list[str]) -> AnswerDelta:
    """The deltas of all pieces in one."""
    whole = AnswerDelta("", [])
    deltas = [push(splitter, piece) for piece in pieces]
    deltas.append(AnswerDelta("", []))
    splitter.flush(deltas[-1])
    for delta in deltas:
        whole.text += delta.text
        whole.reasoning += delta.reasoning
        whole.tool_calls += delta.tool_calls
    return whole


def calls_of(parts: AnswerDelta) -> Calls:
    """Names and arguments; each call has its id and name in its first piece, and there alone."""
    found: Calls = []
    ids = set()
    for piece in parts.tool_calls:
        if piece.name:
            assert piece.index == len(found)
            assert piece.id
            ids.add(piece.id)
            found.append((piece.name, ""))
        else:
            assert not piece.id
            assert piece.index == len(found) - 1
        name, arguments = found[-1]
        found[-1] = (name, arguments + piece.arguments)
    assert len(ids) == len(found)
    return found


def cuts(text: str) -> Iterator[list[str]]:
    """In two at every place, and character by character."""
    yield from ([text[:place], text[place:]] for place in range(len(text) + 1))
    yield list(text)


PARIS = ("get_weather", '{"city": "Paris \\"} </tool_call>"}')
SUM = ("add", '{"numbers": [1, 2.5, {"x": null}], "exact": true}')
NOTHING = ("add", "{}")

RECORDED: dict[str, tuple[ToolFormat, str, str, Calls]] = {
    "one call": (
        HERMES,
        '<tool_call>\n{"name": "get_weather", "arguments": ' + PARIS[1] + "}\n</tool_call>",
        "",
        [PARIS],
    ),
    "words and two calls": (
        HERMES,
        'I will look.\n<tool_call>\n{"name": "get_weather", "arguments": '
        + PARIS[1]
        + '}\n</tool_call>\n<tool_call>{"name":"add","arguments":'
        + SUM[1]
        + "}</tool_call>",
        "I will look.\n",
        [PARIS, SUM],
    ),
    "arguments before the name": (
        HERMES,
        '<tool_call>{"arguments": ' + SUM[1] + ', "name": "add"}</tool_call>',
        "",
        [SUM],
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [NOTHING]),
    "more keys": (
        HERMES,
        '<tool_call>{"id": 7, "name": "add", "arguments": {}, "type": "function"}</tool_call>',
        "",
        [NOTHING],
    ),
    "no closing mark": (HERMES, '<tool_call>{"name": "add", "arguments": {}}', "", [NOTHING]),
    "no closing mark before the next": (
        HERMES,
        '<tool_call>{"name": "add"}<tool_call>{"name": "add"}</tool_call>',
        "",
        [NOTHING, NOTHING],
    ),
    "words behind a call": (
        HERMES,
        '<tool_call>{"name": "add"}</tool_call> Done.',
        "Done.",
        [NOTHING],
    ),
    "just words": (HERMES, "1 < 2 and <tool> is no mark", "1 < 2 and <tool> is no mark", []),
    "no JSON": (HERMES, "<tool_call>add(1)</tool_call>", "<tool_call>add(1)</tool_call>", []),
    "an unknown tool": (
        HERMES,
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        [],
    ),
    "a bad call and a good one": (
        HERMES,
        '<tool_call>{"nam: </tool_call><tool_call>{"name": "add"}</tool_call>',
        '<tool_call>{"nam: </tool_call>',
        [NOTHING],
    ),
    "cut off before the name": (
        HERMES,
        'So: <tool_call>\n{"name": "ad',
        'So: <tool_call>\n{"name": "ad',
        [],
    ),
    "cut off within the arguments": (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"a": [1, ',
        "",
        [("add", '{"a": [1, ')],
    ),
    "Llama's": (
        LLAMA3,
        '{"name": "get_weather", "parameters": ' + PARIS[1] + "}",
        "",
        [PARIS],
    ),
    "Llama's with its tag, and two": (
        LLAMA3,
        '<|python_tag|>{"name": "add", "parameters": ' + SUM[1] + '}; {"name": "add"}',
        "",
        [SUM, NOTHING],
    ),
    "Llama answers with JSON": (
        LLAMA3,
        '{"name": "Paris", "country": "France"}',
        '{"name": "Paris", "country": "France"}',
        [],
    ),
    "Llama answers with words": (LLAMA3, 'Use {"name": "add"}.', 'Use {"name": "add"}.', []),
    "Mistral's": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": '
        + PARIS[1]
        + ', "id": "abc"}, {"name": "add", "arguments": '
        + SUM[1]
        + "}]",
        "",
        [PARIS, SUM],
    ),
    "Mistral's words": (MISTRAL, "A [list] of [TOOLS].", "A [list] of [TOOLS].", []),
    "Mistral's newer ones": (
        MISTRAL_ARGS,
        f"Well.[TOOL_CALLS]{PARIS[0]}[ARGS]{PARIS[1]}[TOOL_CALLS] add [ARGS] {SUM[1]}",
        "Well.",
        [PARIS, SUM],
    ),
    "Mistral's with an id": (
        MISTRAL_ARGS,
        f"[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{SUM[1]} Done.",
        "Done.",
        [SUM],
    ),
    "Mistral's of an unknown tool": (
        MISTRAL_ARGS,
        "[TOOL_CALLS]rm[ARGS]{}",
        "[TOOL_CALLS]rm[ARGS]{}",
        [],
    ),
    "Mistral's arguments that are none": (
        MISTRAL_ARGS,
        "[TOOL_CALLS]add[ARGS]1, 2",
        "[TOOL_CALLS]add[ARGS]1, 2",
        [],
    ),
    "Mistral's without arguments": (
        MISTRAL_ARGS,
        "[TOOL_CALLS]" + 50 * "so on, ",
        "[TOOL_CALLS]" + 50 * "so on, ",
        [],
    ),
    "Mistral's newer ones, cut off": (
        MISTRAL_ARGS,
        '[TOOL_CALLS]add[ARGS]{"a": [1',
        "",
        [("add", '{"a": [1')],
    ),
    "Mistral's without a list": (MISTRAL, "[TOOL_CALLS]{}", "[TOOL_CALLS]{}", []),
}


@pytest.mark.parametrize("case", RECORDED)
def test_calls_are_found_however_the_text_is_cut(case: str) -> None:
    form, text, said, calls = RECORDED[case]
    for pieces in cuts(text):
        parts = run(ToolCallSplitter(form, TOOLS), pieces)
        assert (parts.text, calls_of(parts)) == (said, calls), pieces


def test_arguments_stream_as_they_come() -> None:
    parser = ToolCallSplitter(HERMES, TOOLS)
    assert not push(parser, '<tool_call>{"name": "ad').tool_calls
    (named,) = push(parser, 'd", "argum').tool_calls
    assert (named.name, named.arguments) == ("add", "")
    assert push(parser, 'ents": {"a": 1').tool_calls == (ToolCallDelta(0, arguments='{"a": 1'),)


def test_a_delta_has_one_entry_for_each_call() -> None:
    parser = ToolCallSplitter(HERMES, TOOLS)
    begin, *rest = '<tool_call>{"name": "add", "arguments": {"city": "Paris"}}</tool_call>'
    joined = push(parser, begin)
    for character in rest:
        joined.add(push(parser, character))
    (call,) = joined.tool_calls
    assert (call.name, call.arguments) == ("add", '{"city": "Paris"}')
    two = '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 2
    calls = push(ToolCallSplitter(HERMES, TOOLS), two).tool_calls
    assert [(each.index, each.arguments) for each in calls] == [(0, "{}"), (1, "{}")]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("{%- if builtin_tools %}<|python_tag|>{% endif %}", LLAMA3),
        ("[INST][TOOL_CALLS]", MISTRAL),
        ("[INST][TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_ARGS),
        ("{{ messages }}", HERMES),
    ],
)
def test_a_template_says_how_its_model_calls_tools(template: str, form: ToolFormat) -> None:
    assert tool_format_of(template) is form


def test_ids_are_as_templates_take_them() -> None:
    assert len(MISTRAL.new_id()) == 9
    assert MISTRAL.new_id().isalnum()
    assert {form.new_id() for form in FORMATS.values()}.isdisjoint({HERMES.new_id()})


WRITTEN: dict[str, tuple[bool, str, str, str]] = {
    "a block": (False, "<think>\nHm, a < b.\n</think>\n\nYes.", "Hm, a < b.", "Yes."),
    "a block that the prompt opened": (True, "\nHm.\n\nOh.\n</think>\nYes.", "Hm.\n\nOh.", "Yes."),
    "no thoughts": (False, "Yes, 1 < 2.", "", "Yes, 1 < 2."),
    "empty thoughts": (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    "white space first": (False, " \n<think>a</think>b </think>", "a", "b </think>"),
    "a mark in the middle is text": (False, "It <think>s</think>.", "", "It <think>s</think>."),
    "cut off": (False, "<think>\nHm, so </thi", "Hm, so </thi", ""),
    "nothing": (False, "", "", ""),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_thoughts_are_parted_from_the_answer_however_the_text_is_cut(case: str) -> None:
    opened, text, thought, said = WRITTEN[case]
    for pieces in cuts(text):
        parts = run(ReasoningSplitter(thinking=opened, content=ContentSplitter()), pieces)
        assert (parts.reasoning, parts.text) == (thought, said), pieces


@pytest.mark.parametrize("markers", REASONING_MARKERS)
def test_thoughts_may_have_other_markers(markers: ReasoningMarkers) -> None:
    begin, end = markers
    assert answer_format(f"{{{{ '{end}' }}}}", "auto", "auto").reasoning_markers == markers
    for pieces in cuts(f"{begin}\nHm.\n{end}\nYes."):
        splitter = ReasoningSplitter(thinking=False, content=ContentSplitter(), markers=markers)
        parts = run(splitter, pieces)
        assert (parts.reasoning, parts.text) == ("Hm.", "Yes."), pieces


def test_a_call_after_thoughts_is_a_call_and_one_among_them_is_not() -> None:
    call = '<tool_call>{"name": "add"}</tool_call>'
    for pieces in cuts(f"<think>Maybe {call}?</think>\n{call}"):
        calls = ToolCallSplitter(HERMES, TOOLS)
        parts = run(ReasoningSplitter(thinking=False, content=calls), pieces)
        assert parts.reasoning == f"Maybe {call}?"
        assert (parts.text, calls_of(parts)) == ("", [NOTHING])
