"""Which cluster a name selects."""

from __future__ import annotations

import pytest

from baton.cluster.stopping import select_cluster
from baton.core.errors import InvalidRequest

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
