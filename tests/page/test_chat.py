"""The chat in a real browser: ask, stop, edit, regenerate, copy, settings, and a reload."""

from __future__ import annotations

import re
import time

from browsing import ANSWER_MILLISECONDS, Visit
from playwright.sync_api import expect
from processes import ProcessCluster

PARIS = "The capital of France is Paris."


def test_a_question_is_answered_with_its_figures(visit: Visit) -> None:
    visit.set("Temperature", "0")
    visit.ask("What is the capital of France?")
    expect(visit.answer.locator(".text")).to_have_text(PARIS)
    expect(visit.answer.locator(".ttft")).to_have_text(re.compile(r"TTFT [\d.]+ m?s"))
    expect(visit.answer.locator(".rate")).to_have_text(re.compile(r"[\d.]+ tokens/s"))
    expect(visit.answer).to_contain_text("8 tokens")


def test_enter_sends_and_shift_enter_begins_a_line(visit: Visit) -> None:
    visit.set("Max tokens", "4")
    visit.question.press_sequentially("one")
    visit.question.press("Shift+Enter")
    visit.question.press_sequentially("two")
    visit.question.press("Enter")
    visit.wait_answered()
    assert visit.texts[0] == "one\ntwo"
    expect(visit.question).to_have_value("")


def test_escape_and_stop_cancel_the_request(visit: Visit, cluster: ProcessCluster) -> None:
    page = visit.page
    for stop in (
        lambda: page.keyboard.press("Escape"),
        page.get_by_role("button", name="Stop").click,
    ):
        visit.question.fill("Write a very long story about a river.")
        visit.question.press("Enter")
        writing = page.locator(".message.assistant.writing .text")
        expect(writing).to_have_text(re.compile(r"\w+ \w+ \w+"), timeout=ANSWER_MILLISECONDS)
        with cluster.client() as client:
            assert client.status().active_requests == 1
        stop()
        expect(writing).to_have_count(0)
        expect(visit.answer).to_contain_text("stopped")
        _wait_nothing_active(cluster)
        outcome = page.locator("#rows tr").first.locator("td").nth(3)
        expect(outcome).to_have_text("cancelled", timeout=10_000)
        expect(outcome).to_have_class("cancelled")  # not a failure


def _wait_nothing_active(cluster: ProcessCluster) -> None:
    deadline = time.monotonic() + 20
    with cluster.client() as client:
        while client.status().active_requests:
            assert time.monotonic() < deadline, "the request was not cancelled"
            time.sleep(0.05)


def test_an_edited_message_cuts_what_follows_and_is_asked_again(visit: Visit) -> None:
    visit.set("Temperature", "0")
    visit.set("Max tokens", "12")
    visit.ask("Say hello.")
    visit.ask("Say goodbye.")
    first = visit.page.locator(".message.user").first
    first.get_by_role("button", name="Edit").click()
    field = first.get_by_label("Edit your message")
    expect(field).to_have_value("Say hello.")
    field.press("Escape")
    expect(first.locator(".text")).to_have_text("Say hello.")
    first.get_by_role("button", name="Edit").click()
    field.fill("What is the capital of France?")
    first.get_by_role("button", name="Ask again").click()
    expect(visit.page.locator(".message")).to_have_count(2)
    visit.wait_answered()
    assert visit.texts == ["What is the capital of France?", PARIS]
    assert visit.asked[-1]["messages"] == [
        {"role": "user", "content": "What is the capital of France?"}
    ]


def test_an_answer_is_regenerated_from_its_place(visit: Visit) -> None:
    visit.set("Temperature", "0")
    visit.set("Max tokens", "12")
    visit.ask("What is the capital of France?")
    visit.ask("And of Italy?")
    visit.page.get_by_role("button", name="Regenerate").first.click()
    visit.wait_answered()
    assert visit.texts == ["What is the capital of France?", PARIS]
    assert visit.asked[-1]["messages"] == visit.asked[0]["messages"]


def test_settings_are_sent_and_kept(visit: Visit) -> None:
    given = {"Temperature": "0.5", "Top p": "0.9", "Max tokens": "5", "Seed": "7"}
    for name, value in given.items():
        visit.set(name, value)
    visit.set("System prompt", "Answer briefly.")
    visit.page.reload()
    expect(visit.page.locator("#settings-set")).to_contain_text("temperature 0.5")
    visit.ask("Hello")
    asked = visit.asked[-1]
    assert {name: asked[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.5, "top_p": 0.9, "max_tokens": 5, "seed": 7,
    }  # fmt: skip
    assert asked["messages"] == [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Hello"},
    ]
    visit.set("Top p", "")
    visit.ask("Hello")
    assert "top_p" not in visit.asked[-1]


def test_a_wrong_setting_is_shown_where_it_is(visit: Visit) -> None:
    visit.set("Temperature", "9")
    visit.page.locator("#settings summary").click()
    visit.question.fill("Hello")
    visit.question.press("Enter")
    expect(visit.page.locator("#settings")).to_have_attribute("open", "")
    assert not visit.asked


def test_the_conversation_survives_a_reload_and_can_be_cleared(visit: Visit) -> None:
    visit.set("Max tokens", "12")
    visit.ask("What is the capital of France?")
    figures = visit.answer.locator(".figures").inner_text()
    before = visit.texts
    visit.page.reload()
    assert visit.texts == before
    assert visit.answer.locator(".figures").inner_text() == figures
    visit.ask("And of Italy?")
    assert [turn["content"] for turn in visit.asked[-1]["messages"]] == [*before, "And of Italy?"]  # type: ignore[index]
    visit.page.get_by_role("button", name="New chat").click()
    expect(visit.page.locator(".message")).to_have_count(0)
    visit.page.reload()
    expect(visit.page.locator(".message")).to_have_count(0)


def test_a_reload_keeps_what_was_written_of_an_answer(
    visit: Visit, cluster: ProcessCluster
) -> None:
    visit.question.fill("Write a very long story about a river.")
    visit.question.press("Enter")
    writing = visit.page.locator(".message.assistant.writing .text")
    expect(writing).to_have_text(re.compile(r"\w+ \w+ \w+"), timeout=ANSWER_MILLISECONDS)
    visit.page.reload()
    expect(visit.answer).to_contain_text("stopped")
    expect(visit.answer.locator(".text")).to_have_text(re.compile(r"\w+ \w+ \w+"))
    _wait_nothing_active(cluster)


def test_what_is_kept_is_bounded(visit: Visit) -> None:
    kept = visit.page.evaluate("""async () => {
      const { keepMessages, loadMessages } = await import("/page/conversation.js");
      const answer = { role: "assistant", content: "x".repeat(50000) };
      const turn = (_, number) => [{ role: "user", content: `${number}` }, answer];
      keepMessages(Array.from({ length: 40 }, turn).flat());
      const messages = loadMessages();
      keepMessages([]);
      const questions = messages.filter((each) => each.role === "user");
      return [localStorage.getItem("baton-chat"), questions.map((each) => each.content)];
    }""")
    assert kept == [None, [str(number) for number in range(31, 40)]]


def test_a_message_and_a_code_block_are_copied(visit: Visit) -> None:
    answer = "Run:\n\n```sh\nls -l\n```"
    visit.dictate(answer)
    visit.ask("How?")
    clipboard = "navigator.clipboard.readText()"
    visit.answer.locator(".code").get_by_role("button", name="Copy").click()
    expect(visit.answer.locator(".code-head")).to_contain_text("Copied")
    assert visit.page.evaluate(clipboard) == "ls -l"
    visit.answer.locator(".actions").get_by_role("button", name="Copy").click()
    expect(visit.answer.locator(".actions")).to_contain_text("Copied")
    assert visit.page.evaluate(clipboard) == answer


def test_without_tls_copying_works_too(visit: Visit) -> None:
    visit.page.evaluate("Object.defineProperty(navigator, 'clipboard', { get: () => undefined })")
    visit.dictate("copied the old way")
    visit.ask("How?")
    visit.answer.get_by_role("button", name="Copy").click()
    expect(visit.answer).to_contain_text("Copied")
    visit.question.press("Control+V")
    expect(visit.question).to_have_value("copied the old way")


def test_a_refused_question_says_why_and_can_be_asked_again(visit: Visit) -> None:
    visit.set("Seed", "99999999999999999999")
    visit.ask("Hello")
    expect(visit.answer).to_contain_text("seed")
    expect(visit.answer).not_to_contain_text("TTFT")
    visit.problems.clear()  # the browser notes the status 400
    visit.set("Seed", "4")
    visit.page.get_by_role("button", name="Regenerate").click()
    visit.wait_answered()
    expect(visit.answer.locator(".ttft")).to_be_visible()
