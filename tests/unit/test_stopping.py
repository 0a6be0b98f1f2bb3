"""Which Ray and which cluster `baton stop` selects, and what it asks."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
from ray._private import services
from typer.testing import CliRunner

from baton.cli import fleet_commands
from baton.cli.app import app
from baton.cluster import stopping
from baton.cluster.ray_session import only_address
from baton.cluster.stopping import leave_node, select_cluster
from baton.core.errors import InvalidRequest, Unavailable

TWO = ["baton-blue", "baton-green"]


@pytest.mark.parametrize("name", ["green", "baton-green"])
def test_a_cluster_is_selected_with_or_without_the_prefix(name: str) -> None:
    assert select_cluster(name, TWO) == "baton-green"


def test_the_only_cluster_needs_no_name() -> None:
    assert select_cluster("", ["baton-1f"]) == "baton-1f"


@pytest.mark.parametrize(
    ("name", "found", "words"),
    [
        ("", TWO, "name one of baton-blue, baton-green"),
        ("red", TWO, "there is no cluster red, only baton-blue, baton-green"),
        ("red", [], "there is no cluster"),
    ],
)
def test_an_ambiguous_or_unknown_name_is_refused(name: str, found: list[str], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        select_cluster(name, found)


def rays(monkeypatch: pytest.MonkeyPatch, running: set[str], last: str | None) -> None:
    """Makes this machine one with these Rays, of which `last` was started last."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: running)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: last)


@pytest.mark.parametrize(("running", "last"), [({"a:1"}, "b:2"), (set(), "a:1")])
def test_the_only_ray_of_a_machine_is_taken(
    monkeypatch: pytest.MonkeyPatch, running: set[str], last: str
) -> None:
    rays(monkeypatch, running, last)
    assert only_address("auto") == "a:1"
    assert only_address("c:3") == "c:3"
    monkeypatch.setenv("RAY_ADDRESS", "d:4")
    assert only_address("auto") == "d:4"


def test_none_is_taken_of_several_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    rays(monkeypatch, {"a:1", "b:2"}, "b:2")
    with pytest.raises(InvalidRequest, match=r"several Rays .* give --ray-address a:1 or b:2"):
        only_address("auto")
    with pytest.raises(InvalidRequest, match="several Rays"):
        leave_node("auto", "", 1.0)
    rays(monkeypatch, set(), None)
    with pytest.raises(Unavailable, match="no Ray runs on this machine"):
        only_address("auto")
    with pytest.raises(Unavailable, match="no Ray runs on this machine"):
        leave_node("auto", "", 1.0)


@pytest.mark.parametrize(
    ("arguments", "terminal", "answer", "stopped", "asked"),
    [
        ([], True, "y\n", True, True),
        ([], True, "n\n", False, True),
        (["--yes"], True, "", True, False),
        (["blue"], True, "", True, False),
        ([], False, "", True, False),
    ],
)
def test_stop_asks_in_a_terminal_about_a_cluster_that_was_not_named(
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    terminal: bool,
    answer: str,
    stopped: bool,
    asked: bool,
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(stopping, "find_detached", lambda address, name: ("a:1", "baton-blue"))
    monkeypatch.setattr(stopping, "stop_detached", lambda address, name, *_: ended.append(name))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    stdin = SimpleNamespace(isatty=lambda: terminal)
    monkeypatch.setattr(fleet_commands, "sys", SimpleNamespace(stdin=stdin))
    ran = CliRunner().invoke(app, ["stop", *arguments], input=answer)
    assert (ran.exit_code == 0, ended == ["baton-blue"]) == (stopped, stopped)
    assert ("Stop baton-blue on the Ray at a:1?" in ran.stderr) == asked
