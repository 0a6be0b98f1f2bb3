"""What the dashboard and the alerts ask of Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "baton.json").read_text())
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SHOWN = [target["expr"] for panel in PANELS for target in panel["targets"]]
QUERIES = [*SHOWN, *(rule["expr"] for rule in RULES)]
EVERY_MODEL = ".*"


def metrics_of(query: str) -> set[str]:
    return set(re.findall(r"\b(?:baton_\w+|up)\b(?!\s*\()", query))


def filled(query: str, model: str = EVERY_MODEL) -> str:
    """A query with values for Grafana's variables."""
    return query.replace("$__rate_interval", "1m").replace("$model", model)
