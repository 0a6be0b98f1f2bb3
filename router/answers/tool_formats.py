"""The formats in which models write tool calls, and how to find a model's in its chat template.

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
gemma          <|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>
functiongemma  <start_function_call>call:name{key:<escape>text<escape>}<end_function_call>
harmony        <|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>, as
               gpt-oss writes; its other messages are content and reasoning (splitters.py)

qwen3-coder and glm write values without types; the tool's JSON Schema has them.
"""

from __future__ import annotations

import re
import secrets
import string
from dataclasses import astuple, dataclass
from typing import Literal

MARKER = re.compile(r'(</?[|｜]?[\w▁"]+[|｜]?>|\[[A-Z_]+\])')
_NAME = re.compile(r"[a-zA-Z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Arguments as keys and values. White space is that of a forced call; a parsed call may have
    any, except around a value if `frame` is a line break."""

    key: str
    key_end: str
    value: str
    value_end: str
    end: str  # after the last value

    @property
    def frame(self) -> str:
        """The line break around a value that is not part of it, if any."""
        return "\n" if self.value_end.startswith("\n") else ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is opener, before, name, divider, arguments, closer. Without divider and quote, name
    and arguments are one JSON object. White space is that of a forced call."""

    name: str
    pattern: str  # a regular expression that finds the format in a chat template
    opener: str
    closer: str = ""
    before: str = ""
    divider: str = ""
    id_marker: str = ""  # before an id between the name and the divider
    pairs: Pairs | None = None
    quote: str = ""  # around strings, if arguments are not JSON but LooseJson
    section: tuple[str, str] = ("", "")  # around all calls
    arguments: str = "arguments"  # key of the arguments
    separator: str = ""  # between two calls, which share opener and closer
    bare: bool = False  # an answer that begins with { is a call
    # "written": the model writes it, from `before` to the divider's marker. "short": 9 characters,
    # since some templates accept no others.
    ids: Literal["drawn", "short", "written"] = "drawn"

    def new_id(self) -> str:
        if self.ids == "short":
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    @property
    def named(self) -> bool:
        """True if the name is outside of the arguments' object."""
        return bool(self.divider or self.quote)

    @property
    def name_end(self) -> str:
        """The marker that ends a name; empty if any character that no name has ends it."""
        markers: list[str] = MARKER.findall(self.divider)
        return markers[-1] if markers else self.divider.strip()

    def name_of(self, head: str) -> str:
        """Finds the tool's name in the text between opener and `name_end`."""
        found = _NAME.match(head.strip().removeprefix(self.before.strip()))
        return found[0] if found else ""

    @property
    def markers(self) -> set[str]:
        """Tokens that are needed as text, even if they are special."""
        texts = [self.opener, self.closer, self.before, self.divider, self.id_marker, self.quote]
        texts += self.section
        if self.pairs:
            texts += astuple(self.pairs)
        return {marker for text in texts for marker in MARKER.findall(text)}


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
    "mistral-args", r"\[ARGS\]", _CALLS, divider="[ARGS]", id_marker="[CALL_ID]", ids="short"
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
GEMMA = ToolFormat(
    "gemma",
    r"<\|tool_call>",
    "<|tool_call>",
    "<tool_call|>",
    before="call:",
    quote='<|"|>',
)
FUNCTION_GEMMA = ToolFormat(
    "functiongemma",
    "<start_function_call>",
    "<start_function_call>",
    "<end_function_call>",
    before="call:",
    quote="<escape>",
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

# The first format whose pattern matches a template is its format.
FORMATS = {
    each.name: each
    for each in (
        QWEN3_CODER,
        GLM,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        KIMI,
        GEMMA,
        FUNCTION_GEMMA,
        HARMONY,
        HERMES,
        LLAMA3,
        MISTRAL_ARGS,
        MISTRAL,
    )
}


def tool_format_of(template: str) -> ToolFormat:
    """Returns the tool format that a chat template shows; if none, the most common one."""
    return next((each for each in FORMATS.values() if re.search(each.pattern, template)), HERMES)
