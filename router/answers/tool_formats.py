"""How models write tool calls, and how a chat template shows which of these forms is its model's.

hermes         <tool_call>{"name": …, "arguments": {…}}</tool_call>, one after the other
llama3         {"name": …, "parameters": {…}}, the whole answer; several separated by ;
               with or without <|python_tag|> in front
mistral        [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
mistral-args   [TOOL_CALLS]name[ARGS]{…}, one after the other, as newer Mistral models write;
               some write [CALL_ID] and an id before [ARGS]
deepseek-v3    in a section: <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, then {…} in a block of
               code and <｜tool▁call▁end｜>; also R1
deepseek-v3.1  in a section: <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
kimi           in a section: <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}
               <|tool_call_end|>, with that as the call's id
qwen3-coder    <tool_call><function=name><parameter=key>value</parameter></function></tool_call>
glm            <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>
harmony        <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>, as
               gpt-oss writes; its other messages are content and reasoning (harmony_splitter.py)

qwen3-coder and glm write values without types; the tool's JSON Schema has them.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from baton.core.types import Tool
from baton.router.answers.argument_types import Argument, Schema, argument_schemas, is_text
from baton.router.prompts.output_grammar import ONE_LINE

SpecialId = Callable[[str], int | None]
"""The id of a special token, which no text encodes to; None for any other text."""

MAX_COUNTED = 256
"""A longer text may have any length: grammars grow with what they count."""

MARK = re.compile(r"(</?[|｜]?[\w▁]+[|｜]?>|\[[A-Z_]+\])")
_NAME = re.compile(r"[a-zA-Z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Arguments as keys and values. White space is what a model is made to write; any is read,
    but for a line's end around a value where there is one here."""

    key: str
    key_end: str
    value: str
    value_end: str
    end: str  # after the last

    @property
    def frame(self) -> str:
        """The line's end around a value that is not part of it."""
        return "\n" if self.value_end.startswith("\n") else ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is opener, before, name, divider, arguments, closer; or name and arguments are one
    JSON object, where there is no divider. White space is what a model is made to write."""

    name: str
    sign: str  # a regular expression that finds the format in a chat template
    opener: str
    closer: str = ""
    before: str = ""
    divider: str = ""
    id_mark: str = ""  # before an id between the name and the divider
    pairs: Pairs | None = None
    section: tuple[str, str] = ("", "")  # around all calls
    arguments: str = "arguments"  # key of the arguments
    separator: str = ""  # between two calls, which share opener and closer
    bare: bool = False  # an answer that begins with { is a call
    # "written": the text from `before` to the divider's mark. Some templates accept only short
    # ones.
    ids: Literal["drawn", "short", "written"] = "drawn"

    def new_id(self) -> str:
        if self.ids == "short":
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    @property
    def name_end(self) -> str:
        """What ends a name; empty where any character does that no name has."""
        marks: list[str] = MARK.findall(self.divider)
        return marks[-1] if marks else self.divider.strip()

    def name_of(self, head: str) -> str:
        """The tool's name in what is between opener and `name_end`."""
        found = _NAME.match(head.strip().removeprefix(self.before.strip()))
        return found[0] if found else ""

    @property
    def marks(self) -> set[str]:
        """Tokens that have to be read as text, even where they are special."""
        texts = [self.opener, self.closer, self.before, self.divider, self.id_mark, *self.section]
        if self.pairs:
            texts += astuple(self.pairs)
        return {mark for text in texts for mark in MARK.findall(text)}

    def grammar(self, tools: Sequence[Tool], special_id: SpecialId) -> str:
        """One call of one of the tools, in llguidance's Lark."""
        if not self.divider:
            call = f"call: {_json(self._call_schema(tools))}"
            return f"start: {self._around('call', special_id)}\n{call}"
        rules = [rule for each in enumerate(tools) for rule in self._named_call(*each, special_id)]
        names = " | ".join(f"call_{index}" for index in range(len(tools)))
        return "\n".join((f"start: {self._around(f'({names})', special_id)}", *rules))

    def _around(self, call: str, special_id: SpecialId) -> str:
        if self.bare:
            return call
        opener, closer = self.section[0] + self.opener + self.before, self.closer + self.section[1]
        return f"{literal(opener, special_id)} {call} {literal(closer, special_id)}"

    def _named_call(self, index: int, tool: Tool, special_id: SpecialId) -> Iterator[str]:
        head = f"{json.dumps(tool.name)} {literal(self.divider, special_id)}"
        if self.pairs is None:
            yield f"call_{index}: {head} arguments_{index}"
            yield f"arguments_{index}: {_json(json.loads(tool.parameters))}"
            return
        names: list[str] = []
        rules: list[str] = []
        for number, argument in enumerate(argument_schemas(tool)):
            name = f"argument_{index}_{number}"
            names.append(name if argument.required else f"{name}?")
            rules += self._pair(self.pairs, name, argument, special_id)
        yield f"call_{index}: {' '.join((head, *names))} {literal(self.pairs.end, special_id)}"
        yield from rules

    def _pair(
        self, pairs: Pairs, name: str, argument: Argument, special_id: SpecialId
    ) -> Iterator[str]:
        schema, key = argument.schema, json.dumps(argument.key, ensure_ascii=False)
        begin, end = (literal(each, special_id) for each in (pairs.key, pairs.value_end))
        head = f"{begin} {key} {literal(pairs.key_end + pairs.value, special_id)}"
        if not is_text(schema):
            yield f"{name}: {head} {name}_value {end}"
            yield f"{name}_value: {_json(schema)}"
        elif choices := schema.get("enum"):
            texts = " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
            yield f"{name}: {head} ({texts}) {end}"
        elif schema.get("maxLength", MAX_COUNTED + 1) <= MAX_COUNTED:
            yield f"{name}: {head} {name}_text {end}"
            yield f"{name}_text: /(.|\\n){{{schema.get('minLength', 0)},{schema['maxLength']}}}/"
        else:
            yield f"{name}: {head} {name}_text"
            ending = re.escape(pairs.value_end).replace("\\\n", "\\n").replace("/", "\\/")
            yield f"{name}_text[lazy]: /(.|\\n)*{ending}/"

    def _call_schema(self, tools: Sequence[Tool]) -> Schema:
        calls: list[Schema] = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    self.arguments: json.loads(tool.parameters),
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}


def literal(text: str, special_id: SpecialId) -> str:
    """Lark for a text, in which special tokens are such."""
    pieces = []
    for piece in filter(None, MARK.split(text)):
        token = special_id(piece)
        literal = json.dumps(piece, ensure_ascii=False) if token is None else f"<[{token}]>"
        pieces.append(literal)
    return " ".join(pieces)


def _json(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE})}"


HERMES = ToolFormat("hermes", "<tool_call>", "<tool_call>", "\n</tool_call>", before="\n")
LLAMA3 = ToolFormat(
    "llama3",
    r"<\|python_tag\|>|ipython",
    "<|python_tag|>",
    arguments="parameters",
    separator=";",
    bare=True,
)
_CALLS = "[TOOL_CALLS]"
MISTRAL = ToolFormat(
    "mistral", r"\[TOOL_CALLS\]", _CALLS, "]", before="[", separator=",", ids="short"
)
MISTRAL_ARGS = ToolFormat(
    "mistral-args", r"\[ARGS\]", _CALLS, divider="[ARGS]", id_mark="[CALL_ID]", ids="short"
)
_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_V3 = ToolFormat(
    "deepseek-v3",
    "(?s)<｜tool▁sep｜>.*```json",
    "<｜tool▁call▁begin｜>",
    "\n```<｜tool▁call▁end｜>",
    before="function<｜tool▁sep｜>",
    divider="\n```json\n",
    section=_SECTION,
)
DEEPSEEK_V31 = ToolFormat(
    "deepseek-v3.1",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    divider="<｜tool▁sep｜>",
    section=_SECTION,
)
KIMI = ToolFormat(
    "kimi",
    r"<\|tool_call_argument_begin\|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    before="functions.",
    divider=":0<|tool_call_argument_begin|>",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ids="written",
)
QWEN3_CODER = ToolFormat(
    "qwen3-coder",
    "<function=",
    "<tool_call>",
    "\n</tool_call>",
    before="\n<function=",
    divider=">\n",
    pairs=Pairs("<parameter=", ">\n", "", "\n</parameter>\n", "</function>"),
)
GLM = ToolFormat(
    "glm",
    "<arg_key>",
    "<tool_call>",
    divider="\n",
    pairs=Pairs("<arg_key>", "</arg_key>\n", "<arg_value>", "</arg_value>\n", "</tool_call>"),
)
HARMONY = ToolFormat(
    "harmony",
    r"<\|channel\|>",
    "<|channel|>commentary to=",
    before="functions.",
    divider=" <|constrain|>json<|message|>",
)
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
"""Each ends a message."""

# A template has the first format whose sign is in it.
FORMATS = {
    each.name: each
    for each in (
        QWEN3_CODER,
        GLM,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        KIMI,
        HARMONY,
        HERMES,
        LLAMA3,
        MISTRAL_ARGS,
        MISTRAL,
    )
}


def tool_format_of(template: str) -> ToolFormat:
    """The tool format that a chat template shows; the most common one where it shows none."""
    return next((each for each in FORMATS.values() if re.search(each.sign, template)), HERMES)
