"""A browser, and a cluster whose page it opens.

Needs Debian's chromium (`apt-get install chromium`) and the extra `page` (playwright), which
brings no browser of its own here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import WIDE, Visit
from playwright.sync_api import Browser, sync_playwright
from processes import ProcessCluster, free_port

from baton.core.model_store import EMBEDDED

FLAGS = ["--no-sandbox", "--disable-gpu"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    tree: dict[str, object] = {
        "speculation": "ngram",
        "prefill": {"kv_memory": "256MiB", "chunk_tokens": 64},
        "decode": {"kv_memory": "256MiB"},
        "router": {"http_port": free_port()},  # the same for a router that is started anew
    }
    with ProcessCluster(EMBEDDED, tmp_path_factory.mktemp("page"), tree=tree) as started:
        yield started


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium, "chromium is not installed: apt-get install chromium"
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def visit(cluster: ProcessCluster, browser: Browser) -> Iterator[Visit]:
    context = browser.new_context(
        viewport=WIDE,  # type: ignore[arg-type]
        permissions=["clipboard-read", "clipboard-write"],
    )
    opened = Visit(context.new_page(), f"http://{cluster.http}/")
    yield opened
    context.close()
    assert not opened.problems
    assert not opened.elsewhere


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: --pictures, or pytest's temporary folder."""
    given = request.config.getoption("--pictures")
    folder = Path(given) if given else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", default="", help="a folder for screenshots of the page")
