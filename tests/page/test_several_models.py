"""Several models on the page: one is chosen, asked and shown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browsing import WIDE, Visit
from playwright.sync_api import Browser, Route, expect
from processes import ProcessCluster
from text_model import save_text_model

NAMES = ["one", "org/two"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    folder = tmp_path_factory.mktemp("models")
    models: dict[str, dict[str, object]] = {}
    for seed, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        save_text_model(folder / name, seed)
        models[name] = {"model": str(folder / name)}
    pool = {"kv_memory": "4MiB", "threads": 1}
    tree: dict[str, object] = {"prefill": pool, "decode": pool}
    with ProcessCluster(models, folder / "cluster", tree=tree) as started:
        yield started


@pytest.fixture
def visit(cluster: ProcessCluster, browser: Browser) -> Iterator[Visit]:
    context = browser.new_context(viewport=WIDE)  # type: ignore[arg-type]
    opened = Visit(context.new_page(), f"http://{cluster.http}/")
    yield opened
    context.close()
    assert not opened.problems


def test_the_chosen_model_is_asked_and_shown(visit: Visit) -> None:
    choice = visit.page.get_by_label("Model", exact=True)
    expect(choice.locator("option")).to_have_text(NAMES)
    visit.set("Max tokens", "4")
    for place, name in enumerate(NAMES):
        choice.select_option(name)
        expect(visit.page.locator(".worker")).to_have_count(2, timeout=10_000)
        for role in ("prefill", "decode"):
            shown = visit.page.locator(".worker", has_text=f"{role}-{place}")
            expect(shown).to_be_visible(timeout=10_000)
        visit.ask("Hello")
        assert visit.asked[-1]["model"] == name


def test_a_chosen_model_that_is_removed_gives_way_to_the_other(visit: Visit) -> None:
    choice = visit.page.get_by_label("Model", exact=True)
    choice.select_option("org/two")

    def without_it(route: Route) -> None:
        answer = route.fetch()
        status = answer.json()
        status["models"] = status["models"][:1]
        route.fulfill(response=answer, json=status)

    with visit.page.expect_request(lambda request: request.url.endswith("/v1/trends")):
        visit.page.route("**/v1/cluster", without_it)
    expect(choice).to_be_hidden()
    expect(visit.page.locator("#model")).to_have_text("one")
    expect(visit.page.locator("#state")).to_have_text("ready", timeout=10_000)
