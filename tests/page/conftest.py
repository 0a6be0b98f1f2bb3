"""A browser, and a cluster whose page it opens.

Needs Debian's chromium (`apt-get install chromium`) and the extra `page` (playwright), which
brings no browser of its own here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright
from processes import ProcessCluster

from baton.core.model_store import EMBEDDED

TREE: dict[str, object] = {
    "prefill": {"kv_memory": "256MiB", "chunk_tokens": 64},
    "decode": {"kv_memory": "256MiB"},
}
FLAGS = ["--no-sandbox", "--disable-gpu"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(EMBEDDED, tmp_path_factory.mktemp("page"), tree=TREE) as started:
        yield started


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium, "chromium is not installed: apt-get install chromium"
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: --pictures, or pytest's temporary folder."""
    given = request.config.getoption("--pictures")
    folder = Path(given) if given else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", default="", help="a folder for screenshots of the page")
