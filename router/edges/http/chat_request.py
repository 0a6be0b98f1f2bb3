"""The bodies of /v1/chat/completions, /tokenize and /detokenize: messages, tools, tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    with_config,
)
from typing_extensions import TypedDict

from baton.core import bounds
from baton.core.bounds import MAX_TOOLS
from baton.core.errors import InvalidRequest, NotServed
from baton.core.generation_defaults import GenerationDefaults
from baton.core.types import ChatPrompt, Message, Prompt, Request, Tool, ToolCall
from baton.router.answers.answer_format import with_tools
from baton.router.edges.http.completion_request import ChoicesRequest, StructureFields
from baton.router.edges.http.generation_request import (
    MAX_PROMPT_CHARACTERS,
    PromptText,
    ShortText,
    TextOrParts,
    TopLogprobs,
)
from baton.router.edges.http.request_model import (
    RequestModel,
    StrictModel,
    Unserved,
    about,
    invalid,
    shown,
    tag_by_type,
    token_ids,
)

MAX_TOOL_CHARACTERS = 1_000_000
ToolText = Annotated[str, Field(max_length=MAX_TOOL_CHARACTERS)]


@with_config(ConfigDict(strict=True))
class TextPart(TypedDict):
    """A TypedDict, since there may be thousands and a model takes three times as long to check."""

    type: Literal["text"]
    text: PromptText


class CalledFunction(StrictModel):
    name: ToolText
    arguments: ToolText


@with_config(ConfigDict(strict=True))
class RefusalPart(TypedDict):
    """What the assistant said instead of an answer."""

    type: Literal["refusal"]
    refusal: PromptText


class AssistantCall(StrictModel):
    id: ToolText
    function: CalledFunction

    def to_call(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


Content = TextOrParts[TextPart]
SaidContent = TextOrParts[
    Annotated[
        Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
        Discriminator(tag_by_type("text", "refusal")),
    ]
]


def joined(content: str | Sequence[Mapping[str, object]] | None) -> str:
    """The text of a content or of its parts, refusals included."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part.get("text", part.get("refusal"))) for part in content)


# Chat templates have no developer role, OpenAI's newer name of system.
TEMPLATE_ROLES = {"developer": "system"}


class Prediction(StrictModel):
    type: Literal["content"]
    content: Content

    def text(self) -> str:
        text = joined(self.content)
        if len(text) > bounds.MAX_PREDICTION:
            raise InvalidRequest(
                f"prediction.content must have at most {bounds.MAX_PREDICTION} characters",
                field="prediction.content",
            )
        return text


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: SaidContent | None = None
    refusal: PromptText | None = about("The assistant's, in place of content.")
    tool_calls: Annotated[list[AssistantCall], Field(fail_fast=True)] | None = None
    function_call: object = about("Not served; use tool_calls.")
    tool_call_id: ShortText | None = about("The call that a tool message answers.")
    name: ShortText | None = about("A tool's name; ignored elsewhere.")
    reasoning_content: PromptText | None = about("The assistant's reasoning.")

    def to_message(self, place: int) -> Message:
        """Raises for fields that contradict each other; `place` is the message's index."""
        content = self.refusal if self.content is None else self.content
        if self.role == "function" or self.function_call:
            path = f"messages[{place}]"
            raise NotServed(f"{path} uses functions, which are not served: use tools", field=path)
        if content is None and not self.tool_calls:
            raise _invalid(place, "content", "must be a string, not null")
        if isinstance(content, list):
            content = joined(content)
            if len(content) > MAX_PROMPT_CHARACTERS:
                raise _invalid(
                    place, "content", f"must have at most {MAX_PROMPT_CHARACTERS} characters"
                )
        tool = self.role == "tool"
        if tool and not self.tool_call_id:
            raise _invalid(place, "tool_call_id", "is missing")
        return Message(
            TEMPLATE_ROLES.get(self.role, self.role),
            content or "",
            tuple(call.to_call() for call in self.tool_calls) if self.tool_calls else (),
            (self.tool_call_id or "") if tool else "",
            (self.name or "") if tool else "",
            self.reasoning_content or "",
        )


def _invalid(place: int, field: str, message: str) -> InvalidRequest:
    path = f"messages[{place}].{field}"
    return InvalidRequest(f"{path} {message}", field=path)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Variables that every template gets.
_RESERVED_KWARGS = {"messages", "tools", "documents", "add_generation_prompt"}


def _check_reserved(kwargs: dict[str, object]) -> dict[str, object]:
    if taken := _RESERVED_KWARGS & kwargs.keys():
        raise invalid(f"must not set {min(taken)}")
    return kwargs


TemplateKwargs = Annotated[dict[str, object], AfterValidator(_check_reserved)]


class FunctionTool(StrictModel):
    name: ToolText = Field(json_schema_extra={"pattern": "^[a-zA-Z0-9_-]{1,64}$"})
    description: ToolText | None = None
    parameters: dict[str, object] | None = None


class ChatTool(StrictModel):
    type: Literal["function"]
    function: FunctionTool

    def tool(self) -> Tool:
        function = self.function
        parameters = json.dumps(function.parameters) if function.parameters else ""
        return Tool(function.name, function.description or "", parameters)


class NamedFunction(StrictModel):
    name: ToolText


class NamedChoice(StrictModel):
    function: NamedFunction


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(StrictModel):
    allowed_tools: AllowedTools


def _tool_choice_tag(choice: object) -> str:
    if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        return "<function>"
    if isinstance(choice, dict) and isinstance(choice.get("allowed_tools"), dict):
        return "<allowed>"
    return "<mode>"


def known_choice(tag: Callable[[object], str]) -> BeforeValidator:
    """Refuses a choice that is tagged as a mode but is not one."""

    def check(choice: object) -> object:
        if tag(choice) == "<mode>" and choice not in ("none", "auto", "required"):
            raise invalid(
                f"must be none, auto, required, a function or allowed_tools, not {shown(choice)}"
            )
        return choice

    return BeforeValidator(check)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[NamedChoice, Tag("<function>")]
    | Annotated[AllowedChoice, Tag("<allowed>")],
    Discriminator(_tool_choice_tag),
    known_choice(_tool_choice_tag),
]


class ChatFields(RequestModel):
    """The fields of a chat's prompt besides its messages, for chats and /tokenize."""

    tools: Annotated[list[ChatTool], Field(fail_fast=True, max_length=MAX_TOOLS)] = about(
        "Functions that the model may ask the caller to call.", ()
    )
    tool_choice: ToolChoice | None = about(
        "Whether a tool is called: as the model likes (auto), never, or exactly one."
    )

    chat_template_kwargs: TemplateKwargs = about(
        "Further variables of the model's chat template, such as enable_thinking.", {}
    )
    reasoning_effort: Effort | None = about(
        "How long to think, if the chat template supports it: sets its variables reasoning_effort"
        " and enable_thinking (false for none)."
    )
    add_generation_prompt: bool | None = about("Begin an answer after the messages. Absent: true.")
    continue_final_message: bool = about("Continue the last message instead.", False)

    def chat_prompt(self, messages: list[ChatMessage]) -> ChatPrompt:
        chat = ChatPrompt(
            tuple(message.to_message(place) for place, message in enumerate(messages)),
            template_kwargs=template_kwargs(self.reasoning_effort, self.chat_template_kwargs),
            end=self._end(),
        )
        choice, tools = self.tool_choice, [tool.tool() for tool in self.tools]
        if choice is None:
            choice = "auto" if tools else "none"
        if isinstance(choice, NamedChoice):
            mode, allowed = "required", [choice.function.name]
        elif isinstance(choice, AllowedChoice):
            mode = choice.allowed_tools.mode
            allowed = [each.function.name for each in choice.allowed_tools.tools]
        else:
            mode, allowed = choice, []
        return choose_tools(chat, tools, mode, allowed)

    def _end(self) -> Literal["open", "closed", "continued"]:
        if not self.continue_final_message:
            return "closed" if self.add_generation_prompt is False else "open"
        if self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt contradict each other",
                field="continue_final_message",
            )
        return "continued"


def template_kwargs(effort: str | None, given: Mapping[str, object]) -> str:
    """Returns a template's variables as JSON. Templates name their reasoning switch differently."""
    if effort is None:
        return json.dumps(given) if given else "{}"
    thinks = effort != "none"
    switches = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    return json.dumps({**switches, **given})


def choose_tools(
    chat: ChatPrompt, tools: list[Tool], mode: str, allowed: Sequence[str] = ()
) -> ChatPrompt:
    """Adds tools to a chat. With mode `none` the model does not see them."""
    if mode == "none" or (mode == "auto" and not tools):
        return chat
    return with_tools(chat, tools, must_call=mode == "required", allowed=allowed)


Messages = Annotated[
    list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=bounds.MAX_MESSAGES)
]
_FUNCTIONS = "functions; send tools"
_TEMPLATES = "changes to the chat template"


class ChatRequest(ChatFields, ChoicesRequest):
    messages: Messages
    logprobs: bool = about("Return each token's log probability.", False)
    top_logprobs: TopLogprobs | None = about("Alternatives returned with each; needs logprobs.")
    prediction: Prediction | None = about(
        "The predicted answer. With speculation, parts that match it are generated faster."
    )

    unserved: ClassVar[dict[str, Unserved]] = {
        **ChoicesRequest.unserved,
        "prompt_logprobs": Unserved("log probabilities of a chat's prompt"),
        "functions": Unserved(_FUNCTIONS, ([],)),
        "function_call": Unserved(_FUNCTIONS, ("none",)),
        "modalities": Unserved("answers other than text", (["text"],)),
        "audio": Unserved("answers other than text"),
        "web_search_options": Unserved("web search"),
        "verbosity": Unserved("control of verbosity", ("medium",)),
        "chat_template": Unserved(_TEMPLATES),
        "documents": Unserved(_TEMPLATES, ([],)),
    }

    def requests(self, request_id: str, defaults: GenerationDefaults) -> tuple[Request, ...]:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        prompt = self.chat_prompt(self.messages)
        predicted = self.prediction.text() if self.prediction else ""
        return (self._first(request_id, defaults, prompt, logprobs=logprobs, prediction=predicted),)


def chat_fields(answer: str, structure: str) -> dict[str, Unserved]:
    """Fields of chats that change an answer, for an endpoint without them, whose answers have
    another name and whose structure is in the field `structure`."""
    other = Unserved(f"a structure other than {structure}", ("",))
    scores = f"log probabilities of a {answer}"
    return {
        "n": Unserved("several answers to one request", (1,)),
        **dict.fromkeys(StructureFields.model_fields, other),
        "response_format": Unserved(f"a field of chats; send {structure}", ({"type": "text"},)),
        "structured_outputs": other._replace(harmless=({},)),
        "logprobs": Unserved(scores, (False,)),
        "top_logprobs": Unserved(scores, (0,)),
        "return_token_ids": Unserved(f"token ids of a {answer}", (False,)),
        "chat_template_kwargs": Unserved("variables of the chat template", ({},)),
        "add_generation_prompt": Unserved("a prompt that ends with its messages", (True,)),
        "continue_final_message": Unserved("continuation of the last message", (False,)),
    }


class TokenizeRequest(ChatFields):
    model: ShortText = ""
    prompt: PromptText | None = None
    messages: Messages | None = about("Set these or a prompt.")

    add_special_tokens: bool = about("Add the model's special tokens to a text.", True)

    def to_prompt(self) -> Prompt:
        if self.messages is not None:
            return self.chat_prompt(self.messages)
        if self.prompt is None:
            raise InvalidRequest("a prompt is missing: set prompt or messages", field="prompt")
        return self.prompt


class DetokenizeRequest(RequestModel):
    model: ShortText = ""
    tokens: Annotated[tuple[int, ...], token_ids(bounds.MAX_PROMPT_TOKENS)] = about(
        "The token ids to decode.", ()
    )
    keep_special_tokens: bool = about("Leave special tokens in the text.", False)
