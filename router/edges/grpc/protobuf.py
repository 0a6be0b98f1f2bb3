"""Parses messages into requests, and builds GenerateResponse from events."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sized
from typing import Any

from baton.core import bounds
from baton.core.errors import InvalidRequest, InvalidSampling
from baton.core.generation_defaults import NO_DEFAULTS, GenerationDefaults
from baton.core.types import (
    ChatPrompt,
    Message,
    Pooling,
    Prompt,
    Request,
    Sampling,
    Structure,
    Tool,
    ToolCall,
)
from baton.router.answers.answer_events import (
    AnswerDelta,
    AnswerEvent,
    ScoredToken,
    TokenScore,
)
from baton.router.answers.answer_format import with_tools
from baton.v1 import inference_pb2 as pb


def parse_request(
    message: pb.GenerateRequest, defaults: GenerationDefaults = NO_DEFAULTS
) -> Request:
    """Unset fields take their values from `defaults`."""
    _check_caller_fields(message)
    _check_size("prediction", message.prediction, bounds.MAX_PREDICTION, "characters")
    if message.HasField("max_tokens") and message.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    if message.HasField("n") and not 1 <= message.n <= bounds.MAX_ANSWERS:
        raise InvalidRequest(f"n must be 1 to {bounds.MAX_ANSWERS}, not {message.n}", field="n")
    if not 0 <= message.semantic_similarity <= 1:
        raise InvalidRequest("semantic_similarity must be 0 to 1", field="semantic_similarity")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(message, name) > bounds.MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"{name} must be at most {bounds.MAX_TOP_LOGPROBS}", field=name)
    return Request(
        request_id=message.request_id or uuid.uuid4().hex,
        prompt=parse_prompt(message),
        sampling=defaults.sampling(_given_sampling(message.sampling), prefix="sampling."),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else defaults.max_tokens,
        stop=_parse_stop(message),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        n=message.n or 1,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        structure=_parse_structure(message),
        prediction=message.prediction,
        cache_salt=message.cache_salt,
        retain_seconds=_parse_hint(message.cache_hint),
        priority=message.priority,
        resumed=_parse_resumed(message),
        semantic_similarity=(
            message.semantic_similarity if message.HasField("semantic_similarity") else None
        ),
    )


def _parse_resumed(message: pb.GenerateRequest) -> tuple[int, ...]:
    field = "resumed_token_ids"
    _check_size(field, message.resumed_token_ids, bounds.MAX_PROMPT_TOKENS)
    if message.resumed_token_ids and message.n > 1:
        raise InvalidRequest("a stream of several answers cannot be resumed", field=field)
    if message.resumed_token_ids and not message.sampling.HasField("seed"):
        raise InvalidRequest(
            "to resume a stream, send the seed of its Started as sampling.seed", field=field
        )
    return tuple(message.resumed_token_ids)


def parse_prompt(message: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "chat":
            return _parse_chat(message.chat)
        case "token_ids" if isinstance(message, pb.GenerateRequest):
            _check_size("token_ids", message.token_ids.ids, bounds.MAX_PROMPT_TOKENS)
            return tuple(message.token_ids.ids)
    raise InvalidRequest("a prompt is missing: set text, chat or token_ids", field="prompt")


def parse_embed(message: pb.EmbedRequest) -> list[Request]:
    """One request for each input."""
    _check_caller_fields(message)
    _check_size("inputs", message.inputs, bounds.MAX_INPUTS)
    if not message.inputs:
        raise InvalidRequest("inputs must not be empty", field="inputs")
    if message.pooling not in pb.Pooling.values():
        raise InvalidRequest(f"there is no pooling {message.pooling}", field="pooling")
    request_id = message.request_id or uuid.uuid4().hex
    return [
        Request(
            request_id,
            _parse_input(each),
            Sampling(),
            max_tokens=0,
            pooling=Pooling(message.pooling or pb.POOLING_ENCODER),
            cache_salt=message.cache_salt,
            priority=message.priority,
        )
        for each in message.inputs
    ]


def _parse_input(item: pb.EmbedInput) -> Prompt:
    match item.WhichOneof("input"):
        case "text":
            return item.text
        case "token_ids":
            _check_size("token_ids", item.token_ids.ids, bounds.MAX_PROMPT_TOKENS)
            return tuple(item.token_ids.ids)
    raise InvalidRequest("an input is empty: set text or token_ids", field="inputs")


def _check_caller_fields(message: pb.GenerateRequest | pb.EmbedRequest) -> None:
    _check_size("request_id", message.request_id, bounds.MAX_REQUEST_ID, "characters")
    if message.request_id and not message.request_id.isprintable():  # a newline would split logs
        raise InvalidRequest("request_id must have printable characters", field="request_id")
    _check_size("cache_salt", message.cache_salt, bounds.MAX_CACHE_SALT, "characters")
    if abs(message.priority) > bounds.MAX_PRIORITY:
        limits = f"{-bounds.MAX_PRIORITY} to {bounds.MAX_PRIORITY}"
        raise InvalidRequest(f"priority must be {limits}, not {message.priority}", field="priority")


def _parse_hint(hint: pb.CacheHint) -> int:
    if hint.ttl_seconds > bounds.MAX_CACHE_TTL:
        field = "cache_hint.ttl_seconds"
        raise InvalidRequest(f"{field} must be at most {bounds.MAX_CACHE_TTL}", field=field)
    return hint.ttl_seconds


def _check_size(name: str, value: Sized, most: int, unit: str = "entries") -> None:
    if len(value) > most:
        raise InvalidRequest(f"{name} must have at most {most} {unit}", field=name)


def _parse_chat(chat: pb.Chat) -> ChatPrompt:
    if not chat.messages:
        raise InvalidRequest("a chat needs at least one message", field="chat.messages")
    _check_size("chat.messages", chat.messages, bounds.MAX_MESSAGES)
    for index, message in enumerate(chat.messages):
        if not message.role:
            field = f"chat.messages[{index}].role"
            raise InvalidRequest(f"{field} is empty", field=field)
    choice = chat.tool_choice
    if choice.mode not in pb.ToolChoice.Mode.values():
        raise InvalidRequest(f"there is no mode {choice.mode}", field="chat.tool_choice.mode")
    offered = choice.mode != pb.ToolChoice.MODE_NONE
    must_call = choice.mode == pb.ToolChoice.MODE_REQUIRED
    tools = tuple(Tool(each.name, each.description, each.parameters) for each in chat.tools)
    return with_tools(
        ChatPrompt(tuple(_parse_message(item) for item in chat.messages)),
        tools if offered else (),
        must_call=must_call,
        allowed=(choice.name,) if must_call and choice.name else (),
        prefix="chat.",
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
    kind = message.WhichOneof("structure")
    if kind is None:
        return None
    return Structure("lark" if kind == "grammar" else kind, getattr(message, kind))


def _parse_stop(message: pb.GenerateRequest) -> tuple[str, ...]:
    _check_size("stop", message.stop, bounds.MAX_STOP_STRINGS)
    _check_size("stop_token_ids", message.stop_token_ids, bounds.MAX_STOP_TOKENS)
    most = bounds.MAX_STOP_CHARACTERS
    if any(not 1 <= len(stop) <= most for stop in message.stop):
        raise InvalidRequest(f"a stop string must have 1 to {most} characters", field="stop")
    return tuple(message.stop)


def _given_sampling(message: pb.SamplingParameters) -> dict[str, Any]:
    """The fields of Sampling that the message sets."""
    if len(message.logit_bias) > bounds.MAX_BIASES:
        raise InvalidSampling(
            f"logit_bias must have at most {bounds.MAX_BIASES} entries",
            field="sampling.logit_bias",
        )
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    for name in given.keys() & {"suppress_tokens", "begin_suppress_tokens"}:
        given[name] = tuple(given[name].ids)
    if "bad_words_ids" in given:
        given["bad_words_ids"] = tuple(tuple(run.ids) for run in message.bad_words_ids.runs)
    given.setdefault("seed", secrets.randbits(63))
    given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    return given


def response(event: AnswerEvent, model: str) -> pb.GenerateResponse:
    if isinstance(event, AnswerDelta):
        return _delta_response(event)
    if isinstance(event, pb.Finished):
        return pb.GenerateResponse(finished=event)
    event.model = model
    return pb.GenerateResponse(started=event)


def _delta_response(event: AnswerDelta) -> pb.GenerateResponse:
    """Called for each token: setting fields one by one takes a third of a constructor's time."""
    response = pb.GenerateResponse()
    delta = response.delta
    delta.text = event.text
    delta.token_ids.extend(event.token_ids)
    delta.index = event.index
    delta.reasoning = event.reasoning
    # Accessing an empty repeated field creates it.
    if event.logprobs:
        delta.logprobs.extend(map(_scored, event.logprobs))
    for piece in event.tool_calls:
        delta.tool_calls.add(
            index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments
        )
    if event.prompt_logprobs:
        delta.prompt_logprobs.extend(map(_scored, event.prompt_logprobs[1:]))
    return response


def _scored(token: ScoredToken) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(chosen=_score(token.chosen), top=map(_score, token.top))


def _score(score: TokenScore) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=score.token_id, text=score.data, logprob=score.logprob or 0.0)
