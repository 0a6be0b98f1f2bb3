"""deploy/grafana and deploy/prometheus: every query names a metric and a label that exist."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from monitoring import ALERTS, DASHBOARD, EVERY_MODEL, QUERIES, RULES, SHOWN, filled, metrics_of

from baton.core import errors
from baton.core import metrics as names

LABELS = {
    *("le", "worker", "role", "state", "outcome", "reason", "phase", "policy", "where", "job"),
    *("tier", "event", "instance", "model"),
}
STATES = {"free", "leased", "quarantined", "cached"}
# Prometheus' own, of every target.
UP = "up"


def series(name: str) -> set[str]:
    """What Prometheus keeps of a metric."""
    return {name, f"{name}_bucket", f"{name}_sum", f"{name}_count"}


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_metrics_and_labels_that_exist(query: str) -> None:
    known = {found for name in names.HELP for found in series(name)} | {UP}
    assert metrics_of(query)
    assert metrics_of(query) <= known
    grouped = re.findall(r"\b(?:by|on|ignoring)\s*\(([^)]*)\)", query)
    matched = re.findall(r"(\w+)\s*=~?\s*\"", query)
    used = {label.strip() for group in grouped for label in group.split(",")} | set(matched)
    assert used <= LABELS


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_selects_values_that_exist(query: str) -> None:
    reasons = {
        cls.reason
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.BatonError)
    }
    known = {
        "state": STATES,
        "role": {"prefill", "decode"},
        "outcome": reasons,
        "reason": reasons,
        "model": {EVERY_MODEL},
    }
    for label, values in re.findall(r"(\w+)\s*=~?\s*\"([^\"]*)\"", filled(query)):
        assert set(values.split("|")) <= known[label]


def test_counters_are_looked_at_as_rates_only() -> None:
    for query in QUERIES:
        for name in re.findall(r"\bbaton_\w+(?:_total|_bucket|_sum|_count)\b", query):
            assert re.search(rf"(?:rate|increase)\({name}\b", query), query


def test_panels_show_the_chosen_models() -> None:
    (variable,) = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "model"]
    name = re.fullmatch(r"label_values\((\w+), model\)", variable["query"]["query"])
    assert name
    assert name[1] in names.HELP
    assert (variable["includeAll"], variable["allValue"]) == (True, EVERY_MODEL)
    for query in SHOWN:
        assert len(re.findall(r'\bbaton_\w+\{model=~"\$model"', query)) == query.count("baton_")


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_the_manual_names_the_fault_of_every_alert() -> None:
    manual = (ALERTS.parents[2] / "docs" / "OPERATIONS.md").read_text()
    rows = [line.split("|")[1] for line in manual.splitlines() if line.startswith("| `Baton")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert named == [rule["alert"] for rule in RULES]


def test_alerts_fire_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (apt-get install prometheus)")
    for arguments in (
        ["check", "rules", ALERTS],
        ["test", "rules", ALERTS.with_suffix(".test.yaml")],
    ):
        ended = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
