"""The documentation: short paragraphs, and no path, link or endpoint that does not exist."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import typer
from openapi_document import document

from baton.cli.app import app

ROOT = Path(__file__).parents[2]
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PAGES = sorted([*ROOT.glob("docs/*.md"), *(ROOT / name for name in TOP_PAGES)])
IGNORED = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
FOLDERS = {
    path.name
    for path in ROOT.iterdir()
    if path.is_dir()
    and path.name[0] != "."
    and not any(fnmatch(path.name, pattern) for pattern in IGNORED)
}
"""Of the repository: not what `make` leaves behind."""
OTHERS_NAMES = {"UCX_NET_DEVICES", "RAY_gcs_rpc_server_reconnect_timeout_s"}
MOST_README_LINES = 150
MOST_PARAGRAPH_CHARACTERS = 800
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")
# A path of the repository: folders and a file name, or a folder that ends with a slash.
PATH = re.compile(r"(?:[\w.*-]+/)+(?:[\w*-]+(?:\.[\w*-]+)*)?")


@pytest.fixture(params=PAGES, ids=lambda path: path.name)
def page(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def prose(page: Path) -> str:
    return CODE_BLOCK.sub("", page.read_text())


def paragraphs(text: str) -> Iterator[str]:
    """Blocks between blank lines; each item of a list and each row of a table is one."""
    for block in re.split(r"\n\s*\n", text):
        for part in re.split(r"\n(?=\s*(?:[-*|]|\d+\.) ?)", block):
            yield part.strip()


def exists(name: str, page: Path) -> bool:
    """Whether a path, or a pattern of paths, is there: from the root or beside the page."""
    return any(next(folder.glob(name.rstrip("/")), None) for folder in (ROOT, page.parent))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_README_LINES


def test_paragraphs_are_short(page: Path) -> None:
    long = [text for text in paragraphs(prose(page)) if len(text) > MOST_PARAGRAPH_CHARACTERS]
    assert not long, "\n\n".join(f"{len(text)}: {text}" for text in long)


def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(prose(page)) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def headings(page: Path) -> set[str]:
    """The anchors that a rendered page has."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_anchors_exist(page: Path) -> None:
    links = [
        (page.parent / path if path else page, name) for path, name in ANCHOR.findall(prose(page))
    ]
    assert [f"{target.name}#{name}" for target, name in links if name not in headings(target)] == []


def test_paths_exist(page: Path) -> None:
    named = {
        word
        for code in re.findall(r"`([^`\n]+)`", prose(page))
        for word in PATH.findall(code)
        if PATH.fullmatch(code) and word.split("/")[0] in FOLDERS
    }
    assert sorted(name for name in named if not exists(name, page)) == []


def commands(page: Path) -> Iterator[tuple[str, set[str]]]:
    """Every `baton …` in code: the command and its flags."""
    text = page.read_text()
    code = [*CODE_BLOCK.findall(text), *re.findall(r"`([^`\n]+)`", CODE_BLOCK.sub("", text))]
    for line in "\n".join(code).replace("\\\n", " ").splitlines():
        called = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )?baton ([a-z]+)\b([^#|]*)", line.strip())
        if called:
            yield called[1], set(re.findall(r"(?<=\s)--[a-z-]+", called[2]))


def test_commands_and_flags_exist(page: Path) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command, flags in commands(page):
        assert command in known, command
        group = getattr(known[command], "commands", {}).values()
        options = [*known[command].params, *(option for item in group for option in item.params)]
        assert flags <= {name for option in options for name in option.opts}, command


def test_endpoints_are_those_of_the_openapi_document() -> None:
    listed = re.findall(r"`(GET|POST) (/[^`]*)`", (ROOT / "docs/HTTP_API.md").read_text())
    served = {
        (method.upper(), re.sub(r"{\w+}", "{id}", path))
        for path, item in document()["paths"].items()
        for method in item
    }
    assert {(method, path) for method, path in listed if path != "/"} <= served


def test_names_occur_in_the_code(page: Path) -> None:
    """Names in backticks, such as `Work.answer_tokens`, `router.keys` or `LEASE_SECONDS`."""
    named = re.findall(r"`([A-Za-z_][\w.]*)`", prose(page))
    parts = {part for name in named for part in name.split(".") if part}
    assert sorted(parts - words_of_the_code() - OTHERS_NAMES) == []


@functools.cache
def words_of_the_code() -> set[str]:
    kinds = (".py", ".proto", ".yaml", ".toml", ".js", ".json", ".sh")
    files = (path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in kinds)
    return {word for path in files for word in re.findall(r"\w+", path.read_text())}
