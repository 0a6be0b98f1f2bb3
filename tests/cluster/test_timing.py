"""The ledger of real requests: in the trailer, over HTTP, and by `baton why`."""

from __future__ import annotations

import httpx
import jsonschema
import pytest
from processes import ProcessCluster
from typer.testing import CliRunner

import baton
from baton.cli.app import app
from baton.v1 import timing_pb2 as pb

PROMPT = "Tell me about rivers, mountains and the sea. " * 20


def sums(answer: pb.AnswerTiming) -> tuple[float, float]:
    """What the phases sum to: up to the first token, and in all."""
    parts = [phase for phase in answer.phases if not phase.hidden]
    until = answer.ttft_seconds * 0.999
    return (
        sum(phase.seconds for phase in parts if phase.start_seconds < until),
        sum(phase.seconds for phase in parts),
    )


def kinds(answer: pb.AnswerTiming) -> set[str]:
    names = (pb.PhaseKind.Name(phase.kind) for phase in answer.phases)
    return {name.removeprefix("PHASE_KIND_").lower() for name in names}


def test_a_stream_ends_with_where_its_time_went(idle: ProcessCluster) -> None:
    with idle.client() as client, client.stream(PROMPT, max_tokens=12, ignore_eos=True) as stream:
        answer = stream.read()
        timing = stream.timing
    (told,) = timing.answers
    first, total = sums(told)
    assert first == pytest.approx(told.ttft_seconds, rel=0.01)
    assert total == pytest.approx(told.end_to_end_seconds, rel=0.01)
    assert {"tokenize", "prefill", "first_decode", "decode"} <= kinds(told)
    assert {"transfer", "reserve"} <= kinds(told)
    assert (told.prefill_worker, told.decode_worker) == ("prefill-0", "decode-0")
    assert (told.prompt_tokens, told.completion_tokens) == (answer.usage.prompt_tokens, 12)
    assert sum(chunk.tokens for chunk in told.chunks) == told.prompt_tokens - told.cached_tokens
    assert timing.outcome == "length"


def test_the_router_tells_of_a_request_by_the_id_in_its_header(idle: ProcessCluster) -> None:
    with httpx.Client(base_url=f"http://{idle.http}", timeout=60) as http:
        body = {"prompt": ["One", "Two"], "n": 2, "max_tokens": 4, "stream": True}
        answered = http.post("/v1/completions", json=body)
        request_id = answered.headers["x-request-id"]
        told = http.get(f"/v1/requests/{request_id}/timing").json()
        listed = http.get("/v1/requests?limit=1").json()["data"]
        unknown = http.get("/v1/requests/nobody/timing")
        wrong = http.get("/v1/requests?limit=many")
    assert [answer["completion_tokens"] for answer in told["answers"]] == [4] * 4
    for answer in told["answers"]:
        parts = sum(phase["seconds"] for phase in answer["phases"] if not phase["hidden"])
        assert parts == pytest.approx(answer["end_to_end_seconds"], rel=0.01)
    assert [entry["request_id"] for entry in listed] == [request_id]
    assert (unknown.status_code, wrong.status_code) == (404, 400)


@pytest.mark.parametrize("path", ["/v1/cluster", "/v1/diagnosis", "/v1/trends", "/v1/requests"])
def test_what_operators_look_at_is_as_described(idle: ProcessCluster, path: str) -> None:
    with httpx.Client(base_url=f"http://{idle.http}", timeout=60) as http:
        http.post("/v1/completions", json={"prompt": "One", "max_tokens": 2})
        document = http.get("/openapi.json").json()
        told = http.get(path).json()
    described = document["paths"][path]["get"]["responses"]["200"]["content"]
    schema = {**described["application/json"]["schema"], "components": document["components"]}
    jsonschema.validate(told, schema)


def test_the_cluster_is_told_without_addresses(idle: ProcessCluster) -> None:
    told = httpx.get(f"http://{idle.http}/v1/cluster").text
    assert "decode-0" in told
    assert "127.0.0.1" not in told


def test_baton_diagnose_says_what_holds_the_cluster_back(idle: ProcessCluster) -> None:
    with idle.client() as client:
        client.generate("One", max_tokens=2)
        diagnosis = client.diagnose()
    assert diagnosis.traffic.answers
    assert (diagnosis.prefill.workers, diagnosis.decode.workers) == (1, 1)
    said = CliRunner().invoke(app, ["diagnose", "--address", idle.address])
    assert said.exit_code == 0
    assert "prefill: 1 worker" in said.stdout


def test_baton_top_shows_the_cluster(idle: ProcessCluster) -> None:
    shown = CliRunner().invoke(app, ["top", "--once", "--address", idle.address])
    assert shown.exit_code == 0
    for part in ("decode-0", "TTFT p50", "tokens/s", "outcome"):
        assert part in shown.stdout


def test_baton_why_draws_a_request(idle: ProcessCluster) -> None:
    with idle.client() as client:
        answer = client.chat([("user", "Hello")], max_tokens=3)
        with pytest.raises(baton.UnknownRequest):
            client.timing("nobody")
    drawn = CliRunner().invoke(app, ["why", answer.request_id, "--address", idle.address])
    assert drawn.exit_code == 0
    assert "template" in drawn.stdout
    assert "the parts sum to" in drawn.stdout
    listed = CliRunner().invoke(app, ["why", "--address", idle.address])
    assert answer.request_id in listed.stdout
