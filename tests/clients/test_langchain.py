"""LangChain's ChatOpenAI against a real cluster."""

from __future__ import annotations

import pytest
from langchain_openai import ChatOpenAI, OpenAI
from processes import ProcessCluster
from pydantic import BaseModel, Field

from baton.core.model_store import EMBEDDED_NAME

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


class City(BaseModel):
    name: str = Field(max_length=20)
    inhabitants: int = Field(ge=0, le=99_999_999)


@pytest.fixture
def chat(cluster: ProcessCluster) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"http://{cluster.http}/v1", api_key="none", model=EMBEDDED_NAME, temperature=0
    )


def test_a_question_is_answered(chat: ChatOpenAI) -> None:
    answer = chat.invoke(QUESTION)
    assert answer.content == ANSWER
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["finish_reason"] == "stop"


def test_an_answer_streams(chat: ChatOpenAI) -> None:
    pieces = list(chat.stream(QUESTION, stream_usage=True))
    assert len(pieces) > 3
    assert "".join(str(piece.content) for piece in pieces) == ANSWER


async def test_several_questions_are_answered_at_once(chat: ChatOpenAI) -> None:
    answers = await chat.abatch([QUESTION] * 4)
    assert [answer.content for answer in answers] == [ANSWER] * 4


def test_an_answer_keeps_to_a_model_of_pydantics(chat: ChatOpenAI) -> None:
    city = chat.with_structured_output(City, method="json_schema").invoke("Tell me about Paris.")
    assert isinstance(city, City)


def test_text_is_continued(cluster: ProcessCluster) -> None:
    text = OpenAI(
        base_url=f"http://{cluster.http}/v1",
        api_key="none",
        model=EMBEDDED_NAME,
        temperature=0,
        max_tokens=4,
    )
    assert "Paris" in text.invoke("The capital of France is")
