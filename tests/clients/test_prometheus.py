"""Prometheus scrapes a real cluster as docs/OPERATIONS.md says; promtool checks the metrics."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from monitoring import ALERTS, QUERIES, SHOWN, filled, metrics_of
from processes import ProcessCluster, scrape_text
from prometheus_server import prometheus_server
from serving import MODEST, Serve
from waiting import until


@pytest.fixture(scope="module")
def prometheus(
    programs: Path, cluster: ProcessCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus_server(programs, folder, cluster.metrics, cluster.http, ALERTS) as url:
        yield url


def test_promtool_accepts_the_metrics_of_every_process(
    programs: Path, cluster: ProcessCluster
) -> None:
    with cluster.client() as client:
        client.chat([("user", "Hi")], max_tokens=2)
    workers = [worker.wait_for(r"metrics on (\S+)") for worker in cluster.workers.values()]
    for address in (cluster.metrics, cluster.http, *workers):
        command = [programs / "promtool", "check", "metrics"]
        text = scrape_text(address)
        checked = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert not checked.stdout + checked.stderr


async def test_prometheus_finds_the_router_and_its_workers(prometheus: str) -> None:
    async def all_are_up() -> bool:
        try:
            return ask(prometheus, "sum(up)") == 3
        except httpx.HTTPError:  # it does not listen yet, or is not ready
            return False

    await until(all_are_up, pause=0.2)
    assert ask(prometheus, "count(max by (worker) (baton_running_requests))") == 2
    for query in QUERIES:
        ask(prometheus, filled(query))


def test_panels_show_one_model_or_all(prometheus: str, cluster: ProcessCluster) -> None:
    with cluster.client() as client:
        (model,) = [each.name for each in client.models()]
    gauges = [query for query in SHOWN if "rate(" not in query and "_tier_" not in query]
    for query in gauges:
        assert ask(prometheus, filled(query)) == ask(prometheus, filled(query, model))
        assert ask(prometheus, filled(query, "another")) is None
    assert len([query for query in gauges if ask(prometheus, filled(query)) is not None]) > 5


async def test_every_panel_and_every_rule_finds_its_series_under_ray(
    programs: Path, tmp_path: Path
) -> None:
    tiers = {"host_memory": "16MiB", "files": str(tmp_path / "files"), "files_budget": "16MiB"}
    config = tmp_path / "baton.yaml"
    config.write_text(yaml.safe_dump({**MODEST, "cache": tiers}))
    names = {name for query in QUERIES for name in metrics_of(query)}
    with Serve(tmp_path / "serve", "--config", str(config), "--kv-memory", "64MiB") as serve:
        serve.ready()
        with serve.client() as client:
            client.chat([("user", "Hi")], max_tokens=2)
        (metrics,) = re.findall(r"metrics +http://(\S+)/metrics", serve.stdout)
        (http,) = re.findall(r"page +http://(\S+)/", serve.stdout)
        with prometheus_server(programs, tmp_path, metrics, http, ALERTS) as url:

            async def are_all_there() -> bool:
                try:
                    return all(ask(url, f"count({name})") is not None for name in names)
                except httpx.HTTPError:  # it does not listen yet, or is not ready
                    return False

            await until(are_all_there, pause=0.5)
        serve.send(signal.SIGINT)
        assert serve.wait() == 0


def ask(url: str, query: str) -> float | None:
    """The value of the query's first series, if it has one."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}).raise_for_status()
    series = answer.json()["data"]["result"]
    return float(series[0]["value"][1]) if series else None
