"""Builds the API's messages from a caller's arguments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypedDict, cast

from baton.core.errors import InvalidRequest
from baton.core.types import Message, Tool
from baton.v1 import cluster_pb2, inference_pb2, worker_pb2

MessageLike = Message | Mapping[str, str] | tuple[str, str]
"""One message of a conversation; a dict has the keys "role" and "content"."""


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of every call that generates. None means unset: the model's default
    applies, or else the one noted here."""

    model: str | None  # unset: the one model served
    n: int | None  # answers, 1 to 16; unset: 1. Answer.choices has all
    max_tokens: int | None  # unset: up to the end of the model's context
    temperature: float | None  # 0 or unset: greedy
    top_k: int | None  # keep the k most likely tokens; 0 keeps all
    top_p: float | None  # keep the likeliest tokens up to this probability
    min_p: float | None  # keep tokens this likely, relative to the likeliest
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None  # added to logits, by token id; -100 to 100
    min_tokens: int | None  # minimum before a stop token
    no_repeat_ngram_size: int | None  # no n-gram of this size occurs twice
    suppress_tokens: Sequence[int] | None  # token ids that never occur
    begin_suppress_tokens: Sequence[int] | None  # token ids that never occur first
    bad_words_ids: Sequence[Sequence[int]] | None  # sequences that never occur
    seed: int | None  # unset: a fresh one, found in the answer
    stop: str | Sequence[str] | None  # strings that end the answer
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None  # continue past the model's end tokens
    logprobs: int | None  # return logprobs, with 0 to 20 of the likeliest tokens
    prompt_logprobs: int | None  # the same for the prompt's tokens but the first
    # Structured output; at most one of these.
    json_schema: str | Mapping[str, object] | None
    regex: str | None
    grammar: str | None  # Lark
    prediction: str | None  # of the answer; parts that match it are generated faster
    tools: Sequence[Tool] | None  # for a chat; Answer.tool_calls has the calls
    tool_choice: str | None  # "auto", "none", "required", or the name of the one to call
    cache_salt: str | None  # requests share cached pages only under the same salt
    cache_ttl: int | None  # seconds for which the prompt's cached pages are retained
    priority: int | None  # the lower, the earlier it is admitted; unset: 0
    # Allows cached answers to questions of at least this cosine similarity.
    semantic_similarity: float | None
    request_id: str | None  # for logs; unset: the router chooses
    timeout: float | None  # seconds for the whole answer; unset: no limit


_FIELDS = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
_SAMPLING_FIELDS = inference_pb2.SamplingParameters.DESCRIPTOR.fields_by_name
_STRUCTURES = ("json_schema", "regex", "grammar")


def generate_request(
    prompt: str | Sequence[int], options: GenerateOptions
) -> inference_pb2.GenerateRequest:
    """A request to continue text, or token ids."""
    with values_checked():
        if isinstance(prompt, str):
            return _request(options, text=prompt)
        return _request(options, token_ids=inference_pb2.TokenIds(ids=prompt))


def chat_request(
    messages: Iterable[MessageLike], options: GenerateOptions
) -> inference_pb2.GenerateRequest:
    """A request to answer a conversation."""
    with values_checked():
        chat = _chat(messages)
        _set_tools(chat, options)
        return _request(options, chat=chat)


def tokenize_request(
    prompt: str | Iterable[MessageLike], model: str
) -> inference_pb2.TokenizeRequest:
    """A request to tokenize text, or a conversation."""
    with values_checked():
        if isinstance(prompt, str):
            return inference_pb2.TokenizeRequest(model=model, text=prompt)
        return inference_pb2.TokenizeRequest(model=model, chat=_chat(prompt))


def detokenize_request(
    token_ids: Iterable[int], keep_special_tokens: bool, model: str
) -> inference_pb2.DetokenizeRequest:
    """A request to turn token ids into text."""
    with values_checked():
        return inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, keep_special_tokens=keep_special_tokens
        )


def embed_request(
    inputs: Sequence[str | Sequence[int]],
    model: str,
    pooling: str | None,
    dimensions: int | None,
    *,
    normalize: bool,
    priority: int,
) -> inference_pb2.EmbedRequest:
    with values_checked():
        return inference_pb2.EmbedRequest(
            model=model,
            inputs=map(_embed_input, inputs),
            pooling=inference_pb2.Pooling.Value(f"POOLING_{(pooling or 'unspecified').upper()}"),
            dimensions=dimensions,
            unnormalized=not normalize,
            priority=priority,
        )


def _embed_input(given: str | Sequence[int]) -> inference_pb2.EmbedInput:
    if isinstance(given, str):
        return inference_pb2.EmbedInput(text=given)
    return inference_pb2.EmbedInput(token_ids=inference_pb2.TokenIds(ids=given))


def role_request(worker_id: str, role: str) -> cluster_pb2.SwitchRoleRequest:
    roles = {"prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}
    if role not in roles:
        raise InvalidRequest(f"the role must be prefill or decode, not {role!r}", field="role")
    return cluster_pb2.SwitchRoleRequest(worker_id=worker_id, role=roles[role])


def _chat(messages: Iterable[MessageLike]) -> inference_pb2.Chat:
    # A ChatMessage has the fields of a Message.
    fields: list[dict[str, Any]] = [asdict(_message(message)) for message in messages]
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**each) for each in fields])


def _set_tools(chat: inference_pb2.Chat, options: GenerateOptions) -> None:
    for tool in options.get("tools") or ():
        chat.tools.add(**asdict(tool))
    match options.get("tool_choice") or "auto":
        case "auto":
            return
        case "none":
            chat.tool_choice.mode = inference_pb2.ToolChoice.MODE_NONE
        case choice:
            chat.tool_choice.mode = inference_pb2.ToolChoice.MODE_REQUIRED
            chat.tool_choice.name = "" if choice == "required" else choice


def _message(message: MessageLike) -> Message:
    match message:
        case Message():
            return message
        case Mapping():
            return Message(**cast(Mapping[str, Any], message))
        case (role, content):
            return Message(role, content)
    raise TypeError(f"a message is a Message, a dict or a (role, content) pair, not {message!r}")


def _request(options: GenerateOptions, **prompt: Any) -> inference_pb2.GenerateRequest:
    if unknown := options.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    given: dict[str, Any] = {name: each for name, each in options.items() if each is not None}
    if sum(name in given for name in _STRUCTURES) > 1:
        message = "at most one of json_schema, regex and grammar may be set"
        raise InvalidRequest(message, field="json_schema")
    # A schema may be a dict.
    if not isinstance(given.get("json_schema", ""), str):
        given["json_schema"] = json.dumps(given["json_schema"])
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = [stop] if stop else []
    if "cache_ttl" in given:
        given["cache_hint"] = inference_pb2.CacheHint(ttl_seconds=given["cache_ttl"])
    return inference_pb2.GenerateRequest(
        sampling=_sampling(given),
        **prompt,
        **{name: given[name] for name in _FIELDS if name in given},
    )


def _sampling(given: dict[str, Any]) -> inference_pb2.SamplingParameters:
    values = {name: given[name] for name in _SAMPLING_FIELDS if name in given}
    for name in values.keys() & {"suppress_tokens", "begin_suppress_tokens"}:
        values[name] = inference_pb2.TokenIds(ids=values[name])
    if "bad_words_ids" in values:
        runs = [inference_pb2.TokenIds(ids=run) for run in values["bad_words_ids"]]
        values["bad_words_ids"] = inference_pb2.TokenRuns(runs=runs)
    return inference_pb2.SamplingParameters(**values)


@contextmanager
def values_checked() -> Iterator[None]:
    """Raises InvalidRequest for a number or text that its field cannot hold."""
    try:
        yield
    except UnicodeEncodeError as error:
        # Terminal or pipe input that is not UTF-8 becomes lone surrogates in a str.
        raise InvalidRequest(
            f"a text cannot be written in UTF-8: {error.reason} at character {error.start}"
        ) from error
    except ValueError as error:
        raise InvalidRequest(f"a number does not fit its field: {error}") from error
