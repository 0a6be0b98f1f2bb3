"""From a client's message to a validated Request. A bad one is answered here."""

from __future__ import annotations

import math
import secrets
import uuid

from baton.core.errors import InvalidRequest, InvalidSampling
from baton.core.types import (
    MAX_TOP_LOGPROBS,
    ChatPrompt,
    Message,
    Prompt,
    Request,
    Sampling,
    Structure,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolCall,
)
from baton.router.answers.tools import with_tools
from baton.v1 import inference_pb2 as pb

MAX_REQUEST_BYTES = 8 * 2**20
"""More than a million tokens, as text or as ids."""

MAX_PROMPT_TOKENS = 2_000_000
MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 1024
MAX_REQUEST_ID = 128
MAX_ANSWERS = 16
MAX_CACHE_SALT = 256
MAX_BIASES = 1024
MOST_BIAS = 100.0


def parse_request(message: pb.GenerateRequest) -> Request:
    if len(message.request_id) > MAX_REQUEST_ID:
        raise InvalidRequest(
            f"request_id must have at most {MAX_REQUEST_ID} characters", field="request_id"
        )
    if message.HasField("max_tokens") and message.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    if len(message.cache_salt) > MAX_CACHE_SALT:
        raise InvalidRequest(
            f"cache_salt must have at most {MAX_CACHE_SALT} characters", field="cache_salt"
        )
    if message.HasField("n") and not 1 <= message.n <= MAX_ANSWERS:
        raise InvalidRequest(f"n must be 1 to {MAX_ANSWERS}, not {message.n}", field="n")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(message, name) > MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"{name} must be at most {MAX_TOP_LOGPROBS}", field=name)
    return Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt=parse_prompt(message),
        sampling=_parse_sampling(message.sampling),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        stop=_parse_stop(message),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        n=message.n or 1,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        structure=_parse_structure(message),
        cache_salt=message.cache_salt,
    )


def parse_prompt(message: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            return _parse_chat(message.chat)
        case "token_ids" if isinstance(message, pb.GenerateRequest):
            return _parse_token_ids(message.token_ids)
    raise InvalidRequest("a prompt is missing: set text, chat or token_ids", field="prompt")


def _parse_token_ids(tokens: pb.TokenIds) -> TokenPrompt:
    if len(tokens.ids) > MAX_PROMPT_TOKENS:
        raise InvalidRequest(f"at most {MAX_PROMPT_TOKENS} token ids", field="token_ids")
    return TokenPrompt(tuple(tokens.ids))


def _parse_chat(chat: pb.Chat) -> ChatPrompt:
    if not chat.messages:
        raise InvalidRequest("a chat needs at least one message", field="chat.messages")
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages", field="chat.messages")
    for index, message in enumerate(chat.messages):
        if not message.role:
            field = f"chat.messages[{index}].role"
            raise InvalidRequest(f"{field} is empty", field=field)
    choice = chat.tool_choice
    wanted = choice.mode != pb.ToolChoice.MODE_NONE
    tools = tuple(Tool(each.name, each.description, each.parameters) for each in chat.tools)
    must_call = choice.mode == pb.ToolChoice.MODE_REQUIRED
    return with_tools(
        ChatPrompt(tuple(_parse_message(item) for item in chat.messages)),
        tools if wanted else (),
        must_call=must_call,
        tool_name=choice.name if must_call else "",
        field="chat.tools",
    )


def _parse_message(item: pb.ChatMessage) -> Message:
    return Message(
        item.role,
        item.content,
        tuple(ToolCall(call.id, call.name, call.arguments) for call in item.tool_calls),
        item.tool_call_id,
        item.name,
        item.reasoning,
    )


def _parse_structure(message: pb.GenerateRequest) -> Structure | None:
    match message.WhichOneof("structure"):
        case "json_schema":
            return Structure("json_schema", message.json_schema)
        case "regex":
            return Structure("regex", message.regex)
        case "grammar":
            return Structure("lark", message.grammar)
    return None


def _parse_stop(message: pb.GenerateRequest) -> tuple[str, ...]:
    if len(message.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings", field="stop")
    if len(message.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"at most {MAX_STOP_TOKENS} stop token ids", field="stop_token_ids")
    if any(not 1 <= len(stop) <= MAX_STOP_LENGTH for stop in message.stop):
        raise InvalidRequest(
            f"a stop string must have 1 to {MAX_STOP_LENGTH} characters", field="stop"
        )
    return tuple(message.stop)


def _parse_sampling(message: pb.SamplingParameters) -> Sampling:
    return Sampling(
        temperature=_number(message, "temperature", 0.0, 0.0, 100.0),
        top_k=message.top_k,
        top_p=_number(message, "top_p", 1.0, 0.0, 1.0, above=True),
        min_p=_number(message, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=_number(message, "repetition_penalty", 1.0, 0.0, 100.0, above=True),
        presence_penalty=_number(message, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=_number(message, "frequency_penalty", 0.0, -2.0, 2.0),
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        logit_bias=_parse_biases(message),
    )


def _parse_biases(message: pb.SamplingParameters) -> tuple[tuple[int, float], ...]:
    if len(message.logit_bias) > MAX_BIASES:
        raise InvalidSampling(
            f"logit_bias must have at most {MAX_BIASES} entries", field="sampling.logit_bias"
        )
    for token, bias in message.logit_bias.items():
        if not -MOST_BIAS <= bias <= MOST_BIAS:
            raise InvalidSampling(
                f"logit_bias must be -{MOST_BIAS:g} to {MOST_BIAS:g}, not {bias:g}"
                f" for token {token}",
                field="sampling.logit_bias",
            )
    return tuple(sorted(message.logit_bias.items()))


def _number(
    message: pb.SamplingParameters,
    name: str,
    default: float,
    least: float,
    most: float,
    *,
    above: bool = False,
) -> float:
    """The field's value, within [least, most] or, when `above`, within (least, most]."""
    if not message.HasField(name):  # type: ignore[arg-type]
        return default
    value: float = getattr(message, name)
    if not math.isfinite(value) or not least <= value <= most or (above and value == least):
        bound = f"above {least:g}" if above else f"at least {least:g}"
        raise InvalidSampling(
            f"{name} must be {bound} and at most {most:g}, not {value:g}", field=f"sampling.{name}"
        )
    return value
