"""What one request does, seen from outside, on the embedded model."""

from __future__ import annotations

import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from processes import ProcessCluster, scrape_text

from baton import FinishReason
from baton.core import metrics

OF_MODEL = '{model="SmolLM2-135M-Instruct"}'
QUESTION = [("user", "What is the capital of France?")]


def test_a_chat_is_answered(idle: ProcessCluster) -> None:
    with idle.client() as client:
        answer = client.chat(QUESTION)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason is FinishReason.STOP
    assert (answer.prefill_worker, answer.decode_worker) == ("prefill-0", "decode-0")
    assert answer.usage.completion_tokens == len(answer.token_ids) == 8


def test_a_stream_joins_to_the_whole_answer(idle: ProcessCluster) -> None:
    with idle.client() as client:
        whole = client.chat(QUESTION)
        with client.stream_chat(QUESTION) as stream:
            deltas = list(stream)
        assert stream.answer.text == "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids
    assert len(deltas) > 3


def test_text_chat_and_token_ids_give_the_same_answer(idle: ProcessCluster) -> None:
    with idle.client() as client:
        tokens = client.tokenize(QUESTION).token_ids
        from_chat = client.chat(QUESTION)
        from_tokens = client.generate(tokens)
        from_text = client.generate(client.detokenize(tokens, keep_special_tokens=True))
    assert from_chat.token_ids == from_tokens.token_ids == from_text.token_ids


def test_one_token_never_touches_decode(idle: ProcessCluster) -> None:
    with idle.client() as client:
        answer = client.generate("The capital of France is", max_tokens=1)
    assert answer.decode_worker == ""
    assert answer.finish_reason is FinishReason.LENGTH
    assert len(answer.token_ids) == 1


def test_an_answer_that_ends_with_its_first_token_leaves_nothing_behind(
    idle: ProcessCluster,
) -> None:
    with idle.client() as client:
        first = client.generate("The capital of France is", max_tokens=1).token_ids[0]
        answer = client.generate("The capital of France is", stop_token_ids=[first])
    assert answer.token_ids == (first,)
    assert (answer.text, answer.finish_reason) == ("", FinishReason.STOP)


def test_a_stop_token_ends_the_answer_without_its_text(idle: ProcessCluster) -> None:
    with idle.client() as client:
        whole = client.chat(QUESTION)
        stopped = client.chat(QUESTION, stop_token_ids=[whole.token_ids[3]])
    assert stopped.token_ids == whole.token_ids[:4]
    assert whole.text.startswith(stopped.text)
    assert stopped.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["Paris"], "The capital of France is "),
        (["al of Fr"], "The capit"),
        (["is P", "France"], "The capital of "),
        (["nowhere"], "The capital of France is Paris."),
    ],
)
def test_stop_strings_cut_the_text_wherever_tokens_end(
    idle: ProcessCluster, stop: list[str], text: str
) -> None:
    with idle.client() as client:
        answer = client.chat(QUESTION, stop=stop)
    assert answer.text == text
    assert answer.finish_reason is FinishReason.STOP
    assert (answer.stop in stop) is (stop != ["nowhere"])


def test_an_answer_goes_on_past_the_end_token_when_asked(idle: ProcessCluster) -> None:
    with idle.client() as client:
        answer = client.chat(QUESTION, ignore_eos=True, max_tokens=20)
    assert answer.usage.completion_tokens == 20
    assert answer.finish_reason is FinishReason.LENGTH


def test_characters_of_several_tokens_arrive_whole(idle: ProcessCluster) -> None:
    with idle.client() as client:
        prompt = "🦊🌍 狐狸 こんにちは 🦊🌍 狐狸 こんにちは 🦊🌍 狐狸"
        with client.stream(prompt, max_tokens=40, ignore_eos=True) as stream:
            texts = [delta.text for delta in stream]
        assert "".join(texts) == client.detokenize(stream.answer.token_ids)
    assert all("\ufffd" not in text for text in texts[:-1])


def test_a_cancelled_stream_frees_both_sides(idle: ProcessCluster) -> None:
    with idle.client() as client, client.stream("Once upon a time", ignore_eos=True) as stream:
        next(iter(stream))
        stream.cancel()
    idle.wait_idle()


def test_a_prompt_cancelled_while_it_is_computed_frees_both_sides(idle: ProcessCluster) -> None:
    with idle.client() as client, client.stream([7] * 3000, ignore_eos=True) as stream:
        time.sleep(0.5)
        stream.cancel()
    idle.wait_idle()


def test_health_says_serving(embedded: ProcessCluster) -> None:
    with grpc.insecure_channel(embedded.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "baton.v1.Inference"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_services(embedded: ProcessCluster) -> None:
    with grpc.insecure_channel(embedded.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = next(iter(stub.ServerReflectionInfo(iter([request]))))
    names = {service.name for service in answer.list_services_response.service}
    assert {"baton.v1.Inference", "baton.v1.Admin", "grpc.health.v1.Health"} <= names


def test_the_model_is_listed(embedded: ProcessCluster) -> None:
    with embedded.client() as client:
        (model,) = client.models()
    assert (model.name, model.context_length) == ("SmolLM2-135M-Instruct", 8192)
    assert (model.vocabulary_size, model.has_chat_template) == (49152, True)


def test_metrics_count_what_happened(idle: ProcessCluster) -> None:
    before = scrape(idle)
    with idle.client() as client:
        answer = client.chat(QUESTION, cache_salt="counted")
    after = scrape(idle)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert grown[f"{metrics.TTFT_SECONDS}_count{OF_MODEL}"] == 1
    assert grown[f"{metrics.E2E_SECONDS}_count{OF_MODEL}"] == 1
    assert grown[f"{metrics.ITL_SECONDS}_count{OF_MODEL}"] == 7
    assert grown[f"{metrics.GENERATION_TOKENS}{OF_MODEL}"] == 8
    assert grown[f"{metrics.PROMPT_TOKENS}{OF_MODEL}"] == answer.usage.prompt_tokens
    assert grown[f'{metrics.REQUESTS}{{model="SmolLM2-135M-Instruct",outcome="STOP"}}'] == 1
    pages = -(-answer.usage.prompt_tokens // 16)
    assert grown[f"{metrics.TRANSFER_BYTES}{OF_MODEL}"] == pages * 16 * 30 * 2 * 3 * 64 * 4
    labels = 'model="SmolLM2-135M-Instruct",role="decode",state="free",worker="decode-0"'
    assert f"{metrics.PAGES}{{{labels}}}" in after


def test_end_to_end_time_is_ttft_plus_the_other_tokens(idle: ProcessCluster) -> None:
    before = scrape(idle)
    with idle.client() as client:
        client.chat(QUESTION)
    after = scrape(idle)
    ttft, tpot, e2e = (
        after[f"{name}_sum{OF_MODEL}"] - before[f"{name}_sum{OF_MODEL}"]
        for name in (metrics.TTFT_SECONDS, metrics.TPOT_SECONDS, metrics.E2E_SECONDS)
    )
    assert e2e == pytest.approx(ttft + 7 * tpot, abs=1e-6)


def scrape(cluster: ProcessCluster) -> dict[str, float]:
    lines = scrape_text(cluster.metrics).splitlines()
    rows = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
    return {name: float(value) for name, value in rows}
