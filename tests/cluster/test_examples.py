"""The examples that need nothing beyond the test extra, against a real cluster."""

from __future__ import annotations

import re
from pathlib import Path

from processes import ProcessCluster

from examples import EXAMPLES, run_python

# tests/clients runs these.
ELSEWHERE = {"langchain_chat.py"}


def test_a_chat_reuses_the_pages_of_its_first_turn(idle: ProcessCluster) -> None:
    first, *_, usage, placed = run_python("chat.py", idle.address).splitlines()
    assert first == "The capital of France is Paris."
    cached = re.search(r"cached_tokens=(\d+)", usage)
    assert cached
    assert int(cached[1]) > 0
    assert placed.endswith("decode on decode-0")


def test_an_answer_is_streamed(idle: ProcessCluster) -> None:
    *text, last = run_python("streaming.py", idle.address).splitlines()
    assert "".join(text).strip()
    assert re.fullmatch(r"This seed gives the same answer again: \d+", last)


def test_a_tool_is_called(idle: ProcessCluster) -> None:
    call, *answer = run_python("tools.py", f"http://{idle.http}").splitlines()
    assert re.fullmatch(r'get_weather\(\{"city": ?".*", ?"days": ?[1-7]\}\)', call)
    assert "".join(answer).strip()


def test_an_answer_follows_a_pydantic_model(idle: ProcessCluster) -> None:
    printed = run_python("structured_output.py", f"http://{idle.http}")
    form = r"City\(name='.*', country='(France|Italy|Spain)', inhabitants=\d+\)\n"
    assert re.fullmatch(form, printed)


def test_every_example_is_run() -> None:
    tested = set(re.findall(r"\w+\.py", Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} <= tested | ELSEWHERE
