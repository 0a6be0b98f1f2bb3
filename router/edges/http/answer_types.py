"""JSON types that endpoints return, except those of messages and responses."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

FinishName = Literal["stop", "length", "tool_calls"]


class CalledFunctionObject(TypedDict):
    name: str
    arguments: str


class ToolCallObject(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunctionObject


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallChunk(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class LogprobObject(TypedDict):
    token: str
    logprob: float | None
    bytes: list[int]


class ChosenLogprob(LogprobObject):
    top_logprobs: list[LogprobObject]


class ChatLogprobs(TypedDict):
    content: list[ChosenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class RankedLogprob(TypedDict):
    logprob: float | None
    rank: int | None
    decoded_token: str


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallObject]]


class AssistantDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallChunk]]


class ReturnedTokens(TypedDict):
    token_ids: NotRequired[list[int]]


class ChatChoice(ReturnedTokens):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName


class ChatChunkChoice(ReturnedTokens):
    index: int
    delta: AssistantDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None


class CompletionChoice(ReturnedTokens):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None
    prompt_logprobs: NotRequired[list[dict[str, RankedLogprob] | None]]


class CachedTokens(TypedDict):
    cached_tokens: int


class PredictedTokens(TypedDict):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ResponseCacheUsage(TypedDict):
    """Describes answers from the response cache."""

    kind: str
    age_seconds: float
    similarity: NotRequired[float]  # of the two questions, if they differ
    verified: NotRequired[bool]  # the served model confirmed that they ask the same


class TokenUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[PredictedTokens]
    response_cache: NotRequired[ResponseCacheUsage]


class AnswerHead(TypedDict):
    id: str
    created: int
    model: str


class ChatAnswer(AnswerHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage


class ChatChunk(AnswerHead):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[TokenUsage | None]


class CompletionAnswer(AnswerHead):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[TokenUsage | None]


class ErrorObject(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorObject


class MessagesErrorDetails(TypedDict):
    error_code: str
    unsupported: list[str]


class MessagesErrorObject(TypedDict):
    type: str
    message: str
    details: NotRequired[MessagesErrorDetails]


class MessagesErrorBody(TypedDict):
    type: Literal["error"]
    error: MessagesErrorObject
    request_id: str


class ModelObject(TypedDict):
    """The fields of the OpenAI API, then those of the Anthropic API."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    max_model_len: int | None
    parent: NotRequired[str]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelObject]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False]


class AddedModel(TypedDict):
    model: str
    added: bool


class RemovedModel(TypedDict):
    model: str
    removed: bool


class LoadedAdapter(TypedDict):
    lora_name: str
    digest: str


class RemovedAdapter(TypedDict):
    lora_name: str
    removed: bool


class TokenizeAnswer(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int | None
    rendered: NotRequired[str]


class TokenizerInfo(TypedDict):
    bos_token: NotRequired[str]
    eos_token: NotRequired[str]
    unk_token: NotRequired[str]
    sep_token: NotRequired[str]
    pad_token: NotRequired[str]
    cls_token: NotRequired[str]
    mask_token: NotRequired[str]
    chat_template: str | None


class DetokenizeAnswer(TypedDict):
    prompt: str


class TargetGroup(TypedDict):
    """An entry of Prometheus's service discovery over HTTP."""

    targets: list[str]
    labels: dict[str, str]


class HealthStatus(TypedDict):
    status: str


class Version(TypedDict):
    version: str
