"""The HTTP edge with the OpenAI SDK, plain HTTP, and malformed calls."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator

import httpx
import jsonschema
import openai
import pytest
from processes import ProcessCluster, scrape

import baton
from baton.core import metrics
from baton.router.edges.http.completion_request import ChoicesRequest

MODEL = "SmolLM2-135M-Instruct"
ANSWER = "The capital of France is Paris."
PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def http(idle: ProcessCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{idle.http}", timeout=60) as client:
        yield client


def test_a_chat_is_answered(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert choice.finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer.id == answer._request_id


def test_a_streamed_chat_joins_to_the_whole(sdk: openai.OpenAI) -> None:
    chunks = list(
        sdk.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *deltas, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == ANSWER
    assert len(deltas) > 3
    assert deltas[0].choices[0].delta.role == "assistant"
    assert deltas[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8


async def test_the_async_sdk_streams_too(idle: ProcessCluster) -> None:
    address = f"http://{idle.http}/v1"
    async with openai.AsyncOpenAI(base_url=address, api_key="none") as client:
        whole, stream = await asyncio.gather(
            client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0),
            client.chat.completions.create(
                model=MODEL, messages=QUESTION, temperature=0, stream=True
            ),
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert whole.choices[0].message.content == text == ANSWER


def test_http_and_grpc_give_the_same_answer(sdk: openai.OpenAI, idle: ProcessCluster) -> None:
    with idle.client() as client:
        there = client.generate(PROMPT, n=2, temperature=0.8, top_p=0.9, seed=3, max_tokens=6)
    here = sdk.completions.create(
        model=MODEL, prompt=PROMPT, n=2, temperature=0.8, top_p=0.9, seed=3, max_tokens=6
    )
    assert [choice.text for choice in here.choices] == [item.text for item in there.choices]


def test_a_temperature_of_one_and_a_fresh_seed_are_the_default(sdk: openai.OpenAI) -> None:
    answers = [
        sdk.completions.create(model=MODEL, prompt=PROMPT, n=4, max_tokens=6) for _ in range(2)
    ]
    assert len({choice.text for answer in answers for choice in answer.choices}) > 4


def test_several_prompts_have_choices_in_order(sdk: openai.OpenAI) -> None:
    prompts = [PROMPT, "One, two, three,"]
    alone = [
        sdk.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=4)
        for prompt in prompts
    ]
    options = {"model": MODEL, "temperature": 0, "max_tokens": 4, "n": 2, "echo": True}
    together = sdk.completions.create(prompt=prompts, **options)  # type: ignore[call-overload]
    expected = [
        prompt + answer.choices[0].text
        for prompt, answer in zip(prompts, alone, strict=True)
        for _ in range(2)
    ]
    assert [choice.text for choice in together.choices] == expected
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    assert together.usage.completion_tokens == 16
    texts = [""] * 4
    for chunk in sdk.completions.create(prompt=prompts, stream=True, **options):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_token_ids_are_a_prompt(sdk: openai.OpenAI, http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    options = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    from_text = sdk.completions.create(prompt=PROMPT, **options)  # type: ignore[call-overload]
    from_ids = sdk.completions.create(prompt=tokens, echo=True, **options)  # type: ignore[call-overload]
    assert from_ids.choices[0].text == PROMPT + from_text.choices[0].text


@pytest.mark.parametrize("stop", ["Paris", ["nowhere", "Paris"]])
def test_stop_strings_cut_the_text(sdk: openai.OpenAI, stop: str | list[str]) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, stop=stop)
    assert answer.choices[0].message.content == "The capital of France is "
    assert answer.choices[0].finish_reason == "stop"


def test_fields_beyond_the_api_are_served(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_completion_tokens=12,
        extra_body={"top_k": 1, "ignore_eos": True, "cache_salt": "mine", "min_p": 0.1},
    )
    assert (answer.choices[0].message.content or "").startswith(ANSWER)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_the_model_is_listed(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list()
    assert model.id == sdk.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("a/b")


ERRORS: dict[str, tuple[dict[str, object], type[openai.APIStatusError], str, str]] = {
    "an unknown model": (
        {"model": "gpt-5"},
        openai.NotFoundError,
        "model",
        "model_not_found",
    ),
    "a wrong number": (
        {"temperature": 3},
        openai.BadRequestError,
        "temperature",
        "invalid_sampling",
    ),
    "what is not served": (
        {"modalities": ["audio"]},
        openai.BadRequestError,
        "modalities",
        "unsupported_parameter",
    ),
    "a prompt that is too long": (
        {"messages": [{"role": "user", "content": "word " * 9000}]},
        openai.BadRequestError,
        "messages",
        "context_length_exceeded",
    ),
    "half a character": (
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        openai.BadRequestError,
        "messages[0].content",
        "invalid_request",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", ERRORS)
def test_a_bad_request_raises_the_sdks_own_error(
    sdk: openai.OpenAI, case: str, stream: bool
) -> None:
    changes, error, param, code = ERRORS[case]
    with pytest.raises(error) as caught:
        sdk.post(
            "/chat/completions",
            cast_to=object,
            options={
                "headers": {"content-type": "application/json"},
            },
            content=json.dumps(
                {"model": MODEL, "messages": QUESTION, "stream": stream, **changes}
            ).encode(),
        )
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.request_id


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client, idle: ProcessCluster) -> None:
    with idle.client() as client:
        expected = client.tokenize([("user", "What is the capital of France?")])
    chat = http.post("/tokenize", json={"messages": QUESTION}).json()
    assert chat["tokens"] == list(expected.token_ids)
    assert (chat["count"], chat["max_model_len"]) == (len(chat["tokens"]), 8192)
    body = {"tokens": chat["tokens"], "keep_special_tokens": True}
    assert http.post("/detokenize", json=body).json() == {"prompt": chat["rendered"]}
    refused = http.post("/detokenize", json={"tokens": [49152]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


def test_health_version_metrics_and_document_are_served(
    http: httpx.Client, idle: ProcessCluster
) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert http.get("/version").json() == {"version": baton.__version__}
    assert scrape(idle.http).keys() == scrape(idle.metrics).keys()
    document = http.get("/openapi.json").json()
    assert document["info"]["version"] == baton.__version__
    paths = document["paths"]
    assert {"/v1/chat/completions", "/tokenize", "/metrics"} < paths.keys()


def test_answers_and_errors_are_as_the_document_says(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    calls = [
        (http.get("/v1/models"), "ModelList"),
        (http.get(f"/v1/models/{MODEL}"), "ModelObject"),
        (http.get("/ready"), "HealthStatus"),
        (http.post("/tokenize", json={"prompt": "x"}), "TokenizeAnswer"),
        (http.post("/detokenize", json={"tokens": [5]}), "DetokenizeAnswer"),
        (http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}), "CompletionAnswer"),
        (http.post("/v1/completions", json={}), "ErrorBody"),
        (http.get("/v1/models/nothing"), "ErrorBody"),
        (http.get("/nowhere"), "ErrorBody"),
        (http.get("/health/"), "ErrorBody"),
        (http.get("/v1/completions"), "ErrorBody"),
    ]
    for response, name in calls:
        schema = {**document, "$ref": f"#/components/schemas/{name}"}
        jsonschema.validate(response.json(), schema)
        assert response.headers["x-request-id"]


def test_a_caller_may_name_its_request(http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    named = http.post("/v1/completions", json=body, headers={"x-request-id": "mine-7"})
    assert named.headers["x-request-id"] == named.json()["id"] == "mine-7"
    long = http.post("/v1/completions", json=body, headers={"x-request-id": "x" * 129})
    assert long.headers["x-request-id"] == long.json()["id"] != "x" * 129


BODIES: dict[str, tuple[bytes, str, int]] = {
    "nothing": (b"", "application/json", 400),
    "no JSON": (b"{'prompt': 1}", "application/json", 400),
    "no object": (b"[1]", "application/json", 400),
    "no Unicode": (b'{"prompt": "\xff"}', "application/json", 400),
    "nested too deep": (b'{"a":' + b"[" * 100_000, "application/json", 400),
    "no number": (b'{"prompt": "x", "temperature": NaN}', "application/json", 400),
    "an endless number": (b'{"prompt": "x", "temperature": 1e999}', "application/json", 400),
    "a number of many digits": (
        b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
        "application/json",
        400,
    ),
    "another type": (b'{"prompt": "x"}', "text/plain", 415),
    "too much": (b" " * (8 * 2**20 + 1), "application/json", 413),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_bad_body_has_its_own_status(http: httpx.Client, case: str) -> None:
    content, kind, status = BODIES[case]
    refused = http.post("/v1/completions", content=content, headers={"content-type": kind})
    assert refused.status_code == status
    assert refused.json()["error"]["type"] == "invalid_request_error"


def test_a_body_without_a_length_is_bounded_too(http: httpx.Client) -> None:
    pieces = (b" " * 2**20 for _ in range(9))
    headers = {"content-type": "application/json"}
    refused = http.post("/v1/completions", content=pieces, headers=headers)
    assert refused.status_code == 413


VALUES: list[object] = [None, True, -1, 0, 3, 1.5, -1e300, "", "x", "\u0000", "9" * 400]
VALUES += [[], [[]], {}, {"a": []}, [1, "x"]]
NAMES = [*ChoicesRequest.model_fields, *ChoicesRequest.unserved]
NAMES += [
    "messages",
    "prompt",
    "tokens",
    "tools",
    "tool_choice",
    "response_format",
    "logprobs",
    "top_logprobs",
    "echo",
]
PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/embeddings"]


def malformed(draw: random.Random) -> bytes:
    """A body with several wrong fields, or one that is damaged or cut."""
    body: dict[str, object] = {"messages": QUESTION, "prompt": PROMPT, "max_tokens": 2}
    for name in draw.sample(NAMES, draw.randint(1, 5)):
        body[name] = draw.choice(VALUES)
    content = bytearray(json.dumps(body).encode())
    for _ in range(draw.choice([0, 0, 1, 3])):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content[: draw.choice([len(content), len(content), draw.randrange(len(content))])])


def test_five_hundred_malformed_calls_leave_nothing_behind(
    http: httpx.Client, idle: ProcessCluster
) -> None:
    draw = random.Random(6)
    statuses = set()
    for _ in range(500):
        content = malformed(draw)
        headers = {"content-type": "application/json"}
        response = http.post(draw.choice(PATHS), content=content, headers=headers)
        assert response.status_code < 500, content
        statuses.add(response.status_code)
    assert statuses == {200, 400, 404}
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("garbage", "status"),
    [
        (b"\r\n\r\n\r\n", b"400"),
        (b"GET\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nh: " + b"x" * 70_000, b"431"),
        (bytes(99), b"400"),
    ],
)
def test_garbage_is_refused_and_the_connection_closed(
    idle: ProcessCluster, garbage: bytes, status: bytes
) -> None:
    host, _, port = idle.http.rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(garbage)
        assert connection.recv(100)[:12] in (b"HTTP/1.1 " + status, b"")


def computed(cluster: ProcessCluster) -> float:
    return cluster.metric("decode-0", metrics.COMPUTED_TOKENS)


def until_running(cluster: ProcessCluster, before: float) -> None:
    deadline = time.monotonic() + 30
    while computed(cluster) < before + 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)


ENDLESS = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "n": 2}


def test_a_client_that_disconnects_from_a_stream_cancels_it(
    http: httpx.Client, idle: ProcessCluster
) -> None:
    with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        next(stream.iter_lines())
    idle.wait_idle()


def test_a_client_that_disconnects_cancels_a_whole_answer(idle: ProcessCluster) -> None:
    """It asked for a whole answer, so nothing is sent to it that could fail."""
    before = computed(idle)
    cancelled = scrape(idle.metrics, "outcome").get(f"{metrics.REQUESTS} CANCELLED", 0.0)
    host, _, port = idle.http.rpartition(":")
    body = json.dumps(ENDLESS)
    head = [
        "POST /v1/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall("\r\n".join([*head, "", body]).encode())
        until_running(idle, before)
    idle.wait_idle()
    after = scrape(idle.metrics, "outcome")[f"{metrics.REQUESTS} CANCELLED"]
    assert after == cancelled + 1
