"""The cluster on the page: workers, charts, requests, waterfalls, and a router that is gone."""

from __future__ import annotations

import re
import signal

from browsing import Visit
from playwright.sync_api import Locator, expect
from processes import ProcessCluster


def test_workers_show_what_they_are_and_do(visit: Visit) -> None:
    visit.dictate("one two three " * 12)  # what repeats is guessed
    visit.ask("Hello")
    page = visit.page
    expect(page.locator("#state")).to_have_text("ready", timeout=20_000)
    expect(page.locator("#verdict strong")).to_be_visible()
    decode = page.locator(".worker", has_text="decode-0")
    expect(page.locator(".worker", has_text="prefill-0").locator(".tags")).to_contain_text(
        "prefill"
    )
    expect(decode.locator(".tags")).to_contain_text(
        re.compile(r"speculation: \d+% of [\d,]+ guesses right"), timeout=10_000
    )


def test_each_bar_shows_what_its_text_says(visit: Visit) -> None:
    visit.ask("Hello")
    for meter in visit.page.locator(".meter").all():
        name, words = (
            meter.locator("> span").first.inner_text(),
            meter.locator("> span").last.inner_text(),
        )
        drawn = float(meter.locator("i").evaluate("bar => parseFloat(bar.style.width)"))
        if of := re.fullmatch(r"([\d,]+) of ([\d,]+)", words):
            used, total = (int(number.replace(",", "")) for number in of.groups())
            assert abs(drawn - 100 * used / total) < 0.01, (name, words)
        else:
            assert abs(drawn - float(words.rstrip("%"))) <= 0.5, (name, words)


def test_charts_have_times_and_show_values_at_the_pointer(visit: Visit) -> None:
    visit.ask("Hello")
    page = visit.page
    expect(page.locator("#charts figure")).to_have_count(3)
    rate = page.locator("#charts figure").nth(2)
    plot, tip = rate.locator(".plot"), rate.locator(".tip")
    expect(rate.locator(".times span").first).to_have_text(re.compile(r"\d\d:\d\d"))
    expect(rate.locator(".values span").last).to_have_text("0")
    expect(tip).to_be_hidden()
    _hover_the_end(plot)
    expect(tip).to_have_text(re.compile(r"\d\d:\d\d:\d\dtokens/s [\d,]+"), timeout=10_000)
    shown = tip.inner_text()
    expect(tip).not_to_have_text(shown, timeout=10_000)  # time goes on below a pointer that rests
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    plot.focus()
    plot.press("ArrowLeft")
    expect(tip).to_be_visible()


def _hover_the_end(plot: Locator) -> None:
    box = plot.bounding_box()
    assert box
    plot.hover(position={"x": box["width"] - 2, "y": box["height"] / 2})


def test_requests_are_filtered(visit: Visit) -> None:
    page = visit.page
    visit.set("Max tokens", "4")
    with page.expect_response("**/v1/chat/completions") as answered:
        visit.ask("Hello")
    rows = page.locator("#rows tr")
    page.get_by_label("Filter requests").fill(f"{answered.value.headers['x-request-id']} LENGTH")
    expect(rows).to_have_count(1, timeout=10_000)
    expect(rows).to_contain_text("prefill-0 → decode-0")
    page.get_by_label("Outcome").select_option("failed")
    expect(rows).to_have_count(0)
    expect(page.get_by_text("No request passes the filter.")).to_be_visible()
    page.get_by_label("Outcome").select_option("finished")
    expect(rows).to_have_count(1)


def test_the_waterfall_of_an_answer_opens(visit: Visit) -> None:
    page = visit.page
    visit.ask("What is the capital of France?")
    page.get_by_role("button", name="Where did the time go?").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("prefill-0 → decode-0")
    for phase in ("tokenize", "prefill", "transfer", "first decode step", "decode"):
        expect(dialog.locator("li", has_text=phase).first).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_two_requests_are_compared_side_by_side(visit: Visit) -> None:
    page = visit.page
    visit.set("Max tokens", "4")
    for question in ("Hello", "Good evening", "Good night"):
        visit.ask(question)
    expect(page.locator("#rows tr").nth(2)).to_be_visible(timeout=10_000)
    boxes = page.locator("#rows").get_by_role("checkbox")
    compare = page.locator("#compare")
    expect(compare).to_be_disabled()
    for row in (2, 1, 0):
        boxes.nth(row).check()
    expect(page.locator("#rows input:checked")).to_have_count(2)  # a third replaces the first
    compare.click()
    columns = page.get_by_role("dialog").locator("section")
    expect(columns).to_have_count(2)
    left, right = (column.bounding_box() for column in columns.all())
    assert left
    assert right
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    for column in columns.all():
        expect(column.locator(".fall li").first).to_be_visible()
    ends = [
        float(bar.evaluate("bar => parseFloat(bar.style.left) + parseFloat(bar.style.width)"))
        for bar in columns.locator(".bar").all()
    ]
    assert 99 < max(ends) < 101  # one scale: the slower of both fills it


def test_a_router_that_is_gone_is_told_once_and_found_again(
    visit: Visit, cluster: ProcessCluster
) -> None:
    page = visit.page
    visit.set("Max tokens", "4")
    visit.ask("Hello")
    banner = page.get_by_role("alert")
    expect(banner).to_be_hidden()
    cluster.router.send(signal.SIGTERM)
    assert cluster.router.wait() == 0
    expect(banner).to_contain_text(re.compile(r"as of \d\d:\d\d:\d\d"), timeout=20_000)
    expect(page.locator("#state")).to_have_text("offline")
    expect(page.locator(".as-of").first).to_have_text(re.compile(r"as of \d\d:\d\d:\d\d"))
    visit.question.fill("Are you there?")
    visit.question.press("Enter")
    expect(page.get_by_text("Nothing can be sent")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    expect(visit.question).to_have_value("Are you there?")
    expect(page.get_by_text("Failed to fetch")).to_have_count(0)
    cluster.start_router()
    expect(banner).to_be_hidden(timeout=20_000)
    expect(page.locator(".as-of").first).to_be_hidden()
    visit.question.press("Enter")
    visit.wait_answered()
    expect(visit.answer.locator(".ttft")).to_be_visible()
    assert all("ERR_CONNECTION_REFUSED" in problem for problem in visit.problems), visit.problems
    visit.problems.clear()


def test_a_router_that_stands_still_is_told_too(visit: Visit, cluster: ProcessCluster) -> None:
    expect(visit.page.locator("#state")).to_have_text("ready", timeout=20_000)
    cluster.router.send(signal.SIGSTOP)
    try:
        expect(visit.page.get_by_role("alert")).to_be_visible(timeout=30_000)
    finally:
        cluster.router.send(signal.SIGCONT)
    expect(visit.page.get_by_role("alert")).to_be_hidden(timeout=20_000)
