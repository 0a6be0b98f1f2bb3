"""Fields that clients of other servers send, on a real cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from processes import ProcessCluster
from transformers import AutoTokenizer

from baton.core.model_store import embedded_folder

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The capital of France is"


@pytest.fixture
def http(shallow_idle: ProcessCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{shallow_idle.http}", timeout=60) as client:
        yield client


def choice(http: httpx.Client, path: str, **fields: object) -> dict[str, Any]:
    response = http.post(path, json={"temperature": 0, **fields})
    assert response.status_code == 200, response.text
    (first,) = response.json()["choices"]
    return dict(first)


def chat(http: httpx.Client, **fields: object) -> str:
    fields = {"messages": QUESTION, **fields}
    return str(choice(http, "/v1/chat/completions", **fields)["message"]["content"])


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"guided_choice": ["Berlin", "Paris"]}, ["Berlin", "Paris"]),
        ({"structured_outputs": {"choice": ["the 🌟\n", '"Paris"']}}, ["the 🌟\n", '"Paris"']),
        ({"guided_regex": "[A-Z]{3}"}, None),
        ({"guided_grammar": 'start: "It is " /[A-Z][a-z]{1,8}/ "."'}, None),
        ({"guided_json": {"type": "boolean"}}, ["true", "false"]),
        ({"structured_outputs": {"json": '{"const": 7}'}}, ["7"]),
    ],
)
def test_vllms_names_of_structures_are_known(
    http: httpx.Client, fields: dict[str, Any], answers: list[str] | None
) -> None:
    answer = chat(http, **fields)
    if answers is not None:
        assert answer in answers
    else:
        by_its_own_name = {name.removeprefix("guided_"): value for name, value in fields.items()}
        assert answer == chat(http, **by_its_own_name)


def test_the_last_message_is_continued(idle: ProcessCluster) -> None:
    begun = {"role": "assistant", "content": "The capital of France"}
    with httpx.Client(base_url=f"http://{idle.http}", timeout=60) as http:
        answer = chat(http, messages=[*QUESTION, begun], continue_final_message=True)
    assert answer == " is Paris."


def test_special_tokens_are_shown_where_wanted(http: httpx.Client) -> None:
    end = 2  # <|im_end|>
    fields = {"prompt": PROMPT, "max_tokens": 2, "logit_bias": {str(end): 100}, "ignore_eos": True}
    assert choice(http, "/v1/completions", **fields)["text"] == ""
    shown = choice(http, "/v1/completions", **fields, skip_special_tokens=False)
    assert shown["text"] == "<|im_end|>" * 2


def test_a_prompt_is_scored_without_an_answer(http: httpx.Client) -> None:
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 1}
    scored = choice(http, "/v1/completions", **fields, max_tokens=0)
    longer = choice(http, "/v1/completions", **fields, max_tokens=1)
    assert (scored["text"], scored["finish_reason"]) == (PROMPT, "length")
    tokens = len(scored["logprobs"]["tokens"])
    assert "".join(scored["logprobs"]["tokens"]) == PROMPT
    assert len(longer["logprobs"]["tokens"]) == tokens + 1
    for name, values in scored["logprobs"].items():
        assert values == longer["logprobs"][name][:tokens]
    usage = http.post("/v1/completions", json={**fields, "max_tokens": 0}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (tokens, 0)
    streamed = http.post("/v1/completions", json={**fields, "max_tokens": 0, "stream": True})
    chunks = [json.loads(line[6:]) for line in streamed.text.split("\n\n")[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT


def test_a_prompt_is_cut_at_its_beginning(http: httpx.Client) -> None:
    fields: dict[str, object] = {"max_tokens": 4, "seed": 1}
    tail = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"][-3:]
    cut = choice(http, "/v1/completions", prompt=PROMPT, truncate_prompt_tokens=3, **fields)
    assert cut["text"] == choice(http, "/v1/completions", prompt=tail, **fields)["text"]


def test_only_allowed_tools_are_called(http: httpx.Client) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("rain", "sun")]
    rendered = [
        http.post("/tokenize", json={"messages": QUESTION, "tools": tools, **given}).json()
        for given in ({}, {"tool_choice": allowed("auto", tools[1])})
    ]
    assert rendered[0] == rendered[1]
    response = choice(
        http,
        "/v1/chat/completions",
        messages=QUESTION,
        tools=tools,
        tool_choice=allowed("required", tools[1]),
        max_tokens=40,
    )
    (call,) = response["message"]["tool_calls"]
    assert call["function"]["name"] == "sun"


def allowed(mode: str, *tools: object) -> dict[str, object]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_the_tokenizer_is_described(http: httpx.Client) -> None:
    oracle = AutoTokenizer.from_pretrained(embedded_folder())
    info = http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == (oracle.eos_token, oracle.bos_token)
    assert info["chat_template"] == oracle.chat_template
    plain = http.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": False}).json()
    assert plain["tokens"] == oracle(PROMPT, add_special_tokens=False).input_ids
