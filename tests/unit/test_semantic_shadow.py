"""The semantic cache in the shadow: nothing is answered from it, and what would have been is
reported."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from front_door import front_door
from patience import be_patient, connected
from similar_texts import SemanticRouter, ask, opened
from tiny_encoders import save_encoder
from typer.testing import CliRunner

from baton import AsyncClient, InvalidRequest
from baton.cli.app import app
from baton.core.errors import NotServed
from baton.router.response_cache.shadow import (
    Computed,
    JudgedHit,
    propose_similarity,
    shadow_report,
)
from baton.router.response_cache.similar_questions import cosine
from baton.v1 import responses_pb2
from bench.redis_server import RedisServer


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


def judged(*hits: tuple[float, int, int]) -> list[JudgedHit]:
    """Of (similarity, right hits, false hits)."""
    return [
        JudgedHit(similarity, false)
        for similarity, right, wrong in hits
        for false in [False] * right + [True] * wrong
    ]


@pytest.mark.parametrize(
    ("hits", "rate", "proposed"),
    [
        ([], 0.01, None),
        ([(0.9, 98, 0)], 0.01, None),  # one more hit might be false
        ([(0.9, 99, 0)], 0.01, 0.9),
        ([(0.95, 99, 0), (0.9, 50, 1)], 0.01, 0.95),
        ([(0.95, 150, 0), (0.9, 50, 1)], 0.01, 0.9),
        ([(0.99, 0, 1), (0.9, 99, 0)], 0.01, None),
        ([(0.99, 0, 1), (0.9, 300, 0)], 0.01, 0.9),
        ([(0.9, 99, 99)], 0.01, None),  # all hits of one similarity, or none
        ([(0.9, 9, 0), (0.8, 9, 9)], 0.1, 0.9),
        ([(0.9, 9, 0), (0.8, 9, 9)], 0.6, 0.8),
    ],
)
def test_a_similarity_is_proposed_for_a_share_of_false_hits(
    hits: list[tuple[float, int, int]], rate: float, proposed: float | None
) -> None:
    assert propose_similarity(judged(*hits), rate) == proposed


def test_a_report_counts_what_each_similarity_would_have_done() -> None:
    hits = [
        responses_pb2.ShadowHit(
            similarity=similarity,
            same=answers == 1.0,
            answer_similarity=answers,
            seconds=2.0,
            prompt_tokens=10,
            completion_tokens=5,
        )
        for similarity, answers in ((0.98, 1.0), (0.93, 0.95), (0.83, 0.4))
    ]
    report = shadow_report(hits, 7, 0.4, 0.9)
    assert report.requests == 7
    counts = {
        round(each.similarity, 2): (each.hits, each.different_hits, each.false_hits)
        for each in report.thresholds
    }
    assert (counts[0.5], counts[0.9], counts[0.97]) == ((3, 2, 1), (2, 1, 0), (1, 0, 0))
    assert counts[0.99] == (0, 0, 0)
    assert report.proposed.similarity == pytest.approx(0.93)
    assert (report.proposed.seconds, report.proposed.prompt_tokens) == (4.0, 20)


@pytest.mark.usefixtures("patient")
async def test_what_would_have_been_answered_is_recorded(tmp_path: Path) -> None:
    async def compare(one: Sequence[int], other: Sequence[int]) -> float:
        return 0.25

    async def keep(router: SemanticRouter, text: str, answer: int) -> None:
        inquiry = router.inquiry(ask(text, "alice", None), [*text.encode()])
        assert not inquiry.answers
        inquiry.computed = Computed([answer], 20, 1.5, compare)
        await router.keep_with(inquiry, answer)

    with RedisServer(tmp_path) as redis:
        async with opened(redis.url, semantic="shadow") as router:
            for text, answer in (
                ("weather today", 7),
                ("weather tomorrow", 7),
                ("weather on Mars", 8),
                ("recipe", 9),
                ("recipe", 9),  # computed again: it does not find itself
            ):
                await keep(router, text, answer)
            assert router.responses.shadow
            report = await router.responses.shadow.report(0.5, 0.9)
    assert report.requests == 5
    all_hits = report.thresholds[0]
    assert (all_hits.hits, all_hits.different_hits, all_hits.false_hits) == (2, 1, 1)
    assert (all_hits.seconds, all_hits.prompt_tokens, all_hits.completion_tokens) == (3.0, 40, 2)


@pytest.mark.usefixtures("patient")
async def test_the_shadow_records_what_a_verification_would_have_refused(tmp_path: Path) -> None:
    async def compare(one: Sequence[int], other: Sequence[int]) -> float:
        return 0.25

    settings = {"semantic": "shadow", "semantic_verify_seconds": 60.0}
    with RedisServer(tmp_path) as redis:
        async with opened(redis.url, **settings) as router:
            for text, answer in (("weather today", 7), ("weather now", 7), ("weather on Mars", 8)):
                inquiry = router.inquiry(ask(text, "alice", None), [*text.encode()])
                inquiry.computed = Computed([answer], 20, 1.5, compare)
                await router.keep_with(inquiry, answer)
            assert router.responses.shadow
            report = await router.responses.shadow.report(0.5, 0.9)
    hits = report.thresholds[0]
    assert (hits.hits, hits.false_hits) == (2, 1)
    assert (hits.verified_hits, hits.refused_hits, hits.refused_false_hits) == (2, 1, 1)
    assert (report.proposed_verified.hits, report.proposed_verified.false_hits) == (1, 0)


@pytest.mark.usefixtures("patient")
async def test_a_router_in_the_shadow_computes_and_reports(tmp_path: Path) -> None:
    save_encoder(tmp_path / "mini")
    with RedisServer(tmp_path) as redis:
        cache = {"responses": "semantic", "semantic": "shadow", "redis": redis.url}
        tree: dict[str, object] = {"cache": cache, "embedding_model": str(tmp_path / "mini")}
        async with front_door(tree) as server, httpx.AsyncClient(timeout=60) as http:
            await connected(server)
            url = f"http://{server.http_address}/v1/chat/completions"
            for number in range(3):
                message = {"role": "user", "content": f"question {number}"}
                body = {"messages": [message], "max_tokens": 3, "temperature": 0}
                answer = await http.post(url, json={**body, "semantic_similarity": 0})
                assert answer.status_code == 200, answer.text
                assert "x-baton-cache" not in answer.headers
                assert server._responses
                await server._responses.settle()
            async with AsyncClient(server.address) as client:
                report = await client.semantic_report(0.5)
                with pytest.raises(InvalidRequest, match="false_hit_rate must be above 0"):
                    await client.semantic_report(0.0)
            command = ["cache", "report", "--address", server.address, "--false-hits", "0.5"]
            shown = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert report.requests == 3
    assert (report.proposed.hits, report.proposed.different_hits) == (2, 0)
    assert shown.exit_code == 0, shown.output
    assert "3 requests were compared with earlier ones" in shown.output
    assert "(0 of 2 hits are false)" in shown.output


async def test_a_router_without_a_shadow_says_so() -> None:
    async with front_door() as server, AsyncClient(server.address) as client:
        with pytest.raises(NotServed, match="records no shadow"):
            await client.semantic_report()


def test_vectors_are_compared_by_their_directions() -> None:
    one, other = b"\0\0\x80?\0\0\0\0", b"\0\0\0A\0\0\0A"
    assert cosine(one, other) == pytest.approx(0.5**0.5)
    assert cosine(bytes(8), one) == 0.0
