"""/v1/messages over plain HTTP, on a real cluster."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import httpx
import pytest
from processes import ProcessCluster

from baton.core.proto_json import Json

ANSWER = "The capital of France is Paris."
ASKED: Json = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 20,
    "temperature": 0,
}


@pytest.fixture
def http(idle: ProcessCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{idle.http}", timeout=60) as client:
        yield client


def test_a_message_is_answered_as_a_chat_is(http: httpx.Client) -> None:
    answered = http.post("/v1/messages?beta=true", json=ASKED)
    message = answered.json()
    assert answered.headers["request-id"] == message["id"]
    assert message["content"] == [{"type": "text", "text": ANSWER}]
    chat = http.post("/v1/chat/completions", json=ASKED).json()
    assert chat["choices"][0]["message"]["content"] == ANSWER
    assert chat["usage"]["completion_tokens"] == message["usage"]["output_tokens"]


def test_a_billing_header_that_changes_leaves_the_prefix_cached(http: httpx.Client) -> None:
    """Another prompt than other tests have, twice."""
    rules = f"Answer briefly. {uuid.uuid4()} " + "Never say more than you know. " * 8
    usages = []
    for call in range(2):
        bill = {"type": "text", "text": f"x-anthropic-billing-header: cch={call};"}
        system = [bill, {"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}}]
        answer = http.post("/v1/messages", json={**ASKED, "system": system}).json()
        usages.append(answer["usage"])
    first, second = usages
    assert first["cache_read_input_tokens"] < second["cache_read_input_tokens"]
    total = first["input_tokens"] + first["cache_read_input_tokens"]
    assert second["input_tokens"] + second["cache_read_input_tokens"] == total
    assert second["cache_read_input_tokens"] > total / 2
