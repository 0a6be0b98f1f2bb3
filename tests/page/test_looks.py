"""Each state in light, dark and phone width, as pictures; nothing is wider than its screen."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from browsing import PHONE, WIDE, Visit
from playwright.sync_api import Browser, Page, expect
from processes import ProcessCluster

ANSWER = """Sorting a list in **Python**:

1. Call `sorted(items)` for a new list.
2. Call `items.sort()` to sort in place.

```python
items = [3, 1, 2]
print(sorted(items, key=lambda item: -item))  # a line that is longer than a phone is wide
```

| call | copies | returns |
|------|:------:|--------:|
| `sorted` | yes | the list |
| `sort` | no | `None` |

> Both are *stable*. See [the docs](https://docs.python.org/3/howto/sorting.html)."""

LOOKS = {
    "light": {"viewport": WIDE, "color_scheme": "light"},
    "dark": {"viewport": WIDE, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "color_scheme": "light", "has_touch": True, "is_mobile": True},
    "phone-dark": {"viewport": PHONE, "color_scheme": "dark", "has_touch": True, "is_mobile": True},
}


@pytest.mark.parametrize("look", LOOKS)
def test_every_state_fits(
    cluster: ProcessCluster, browser: Browser, pictures: Path, look: str
) -> None:
    context = browser.new_context(**LOOKS[look])  # type: ignore[arg-type]
    visit = Visit(context.new_page(), f"http://{cluster.http}/")
    page = visit.page

    def picture(state: str, whole: bool = False) -> None:
        width = page.viewport_size
        assert width
        assert page.evaluate("document.documentElement.scrollWidth") <= width["width"], state
        page.screenshot(path=str(pictures / f"{look}-{state}.png"), full_page=whole)

    picture("empty", whole=True)
    visit.dictate(ANSWER)
    visit.ask("How do I sort a list?")
    visit.set("System prompt", "You are a patient teacher.")
    expect(page.locator("#rows tr").first).to_be_visible(timeout=10_000)
    page.wait_for_timeout(2500)  # a point in the charts
    picture("chat")
    page.locator("#settings summary").click()
    picture("whole", whole=True)
    if look.startswith("phone"):
        table = (
            "box => box.scrollWidth > box.clientWidth && getComputedStyle(box).overflowX == 'auto'"
        )
        assert page.locator("#requests .scroll").evaluate(table)
    another = {"prompt": "Hello", "max_tokens": 1}
    httpx.post(f"http://{cluster.http}/v1/completions", json=another, timeout=60).raise_for_status()
    _compare(page)
    picture("compared")
    page.keyboard.press("Escape")
    page.locator(".plot").last.scroll_into_view_if_needed()
    page.locator(".plot").last.focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    picture("hover")
    page.locator("#messages").evaluate("list => list.scrollTo(0, 0)")
    page.get_by_role("button", name="Edit").first.click()
    picture("edit")
    context.set_offline(True)
    expect(page.get_by_role("alert")).to_be_visible(timeout=20_000)
    picture("offline", whole=True)
    context.close()
    assert all("ERR_INTERNET_DISCONNECTED" in problem for problem in visit.problems)


def _compare(page: Page) -> None:
    boxes = page.locator("#rows").get_by_role("checkbox")
    expect(boxes.nth(1)).to_be_visible(timeout=10_000)
    boxes.nth(0).check()
    boxes.nth(1).check()
    page.locator("#compare").click()
    expect(page.get_by_role("dialog").locator(".fall").nth(1)).to_be_visible()


def test_the_theme_can_be_chosen_and_stays(visit: Visit) -> None:
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
