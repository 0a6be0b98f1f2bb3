"""The page in a real browser: a question, its answer as it streams, and where the time went."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from processes import ProcessCluster

WIDE = {"width": 1400, "height": 1000}
PHONE = {"width": 390, "height": 844}
ANSWER_SECONDS = 90_000


class Visit:
    """A page that is open, and all that went wrong on it."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.problems: list[str] = []
        self.elsewhere: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._note)
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(address) else self.elsewhere.append(request.url)
            ),
        )
        page.goto(address)

    def _note(self, message: object) -> None:
        if getattr(message, "type", "") == "error":
            self.problems.append(str(getattr(message, "text", "")))

    def ask(self, question: str) -> None:
        self.page.get_by_label("Your message").fill(question)
        self.page.get_by_role("button", name="Send").click()
        expect(self.page.locator(".message.assistant").last).not_to_have_class(
            re.compile("writing"), timeout=ANSWER_SECONDS
        )


@pytest.fixture
def visit(cluster: ProcessCluster, browser: Browser) -> Iterator[Visit]:
    context = browser.new_context(viewport=WIDE)  # type: ignore[arg-type]
    opened = Visit(context.new_page(), f"http://{cluster.http}/")
    yield opened
    context.close()
    assert not opened.problems
    assert not opened.elsewhere


def test_a_question_is_answered_and_its_waterfall_opens(visit: Visit, pictures: Path) -> None:
    page = visit.page
    page.get_by_label("Temperature").fill("0")
    visit.ask("What is the capital of France?")
    answer = page.locator(".message.assistant").last
    expect(answer.locator(".text")).to_have_text("The capital of France is Paris.")
    expect(answer.locator(".ttft")).to_have_text(re.compile(r"TTFT [\d.]+ m?s"))
    expect(answer.locator(".rate")).to_have_text(re.compile(r"[\d.]+ tokens/s"))
    expect(answer).to_contain_text("8 tokens")
    page.wait_for_timeout(5000)  # a few points for the charts
    page.screenshot(path=str(pictures / "wide-light.png"), full_page=True)
    page.get_by_role("button", name="where did the time go?").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("prefill-0 → decode-0")
    for phase in ("tokenize", "prefill", "transfer", "first decode step", "decode"):
        expect(dialog.locator("li", has_text=phase).first).to_be_visible()
    page.screenshot(path=str(pictures / "waterfall.png"))
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_be_hidden()


def test_an_answer_shows_while_it_is_written_and_can_be_stopped(visit: Visit) -> None:
    page = visit.page
    page.get_by_role("spinbutton", name="Tokens").fill("400")
    page.get_by_label("Your message").fill("Write a long story about a river.")
    page.get_by_label("Your message").press("Enter")
    writing = page.locator(".message.assistant.writing .text")
    expect(writing).to_have_text(re.compile(r"\w+ \w+ \w+"), timeout=ANSWER_SECONDS)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".message.assistant.writing")).to_have_count(0)
    row = page.locator("#rows tr").first
    expect(row).to_contain_text("cancelled", timeout=10_000)


def test_the_cluster_and_the_latest_requests_show(visit: Visit, pictures: Path) -> None:
    page = visit.page
    visit.ask("Hello")
    expect(page.locator("#state")).to_have_text("ready", timeout=20_000)
    expect(page.locator(".worker .name").first).to_contain_text("prefill-0")
    expect(page.locator("#verdict strong")).to_be_visible()
    expect(page.locator("#charts figure")).to_have_count(3)
    page.locator("#rows button").first.click()
    expect(page.get_by_role("dialog")).to_contain_text("first token")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_the_theme_can_be_chosen_and_stays(visit: Visit, pictures: Path) -> None:
    page = visit.page
    button = page.get_by_role("button", name=re.compile("Light, dark"))
    shown = set()
    for _ in range(3):
        button.click()
        shown.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(shown) == 2
    button.click()
    button.click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    visit.ask("Hello")
    page.screenshot(path=str(pictures / "wide-dark.png"), full_page=True)


def test_a_phone_needs_no_sideways_scrolling(
    cluster: ProcessCluster, browser: Browser, pictures: Path
) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True)  # type: ignore[arg-type]
    visit = Visit(context.new_page(), f"http://{cluster.http}/")
    visit.ask("Hello")
    page = visit.page
    page.wait_for_timeout(2500)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.screenshot(path=str(pictures / "phone.png"), full_page=True)
    page.get_by_role("button", name="where did the time go?").click()
    page.screenshot(path=str(pictures / "phone-waterfall.png"))
    context.close()
    assert not visit.problems
