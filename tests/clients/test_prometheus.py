"""Prometheus scrapes a real cluster as docs/OPERATIONS.md says; promtool checks the metrics."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from monitoring import ALERTS, QUERIES
from processes import ProcessCluster, free_port, scrape_text
from serving import Command
from waiting import until

from examples import run

DOWNLOAD_SECONDS = 300


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `prometheus` and `promtool`."""
    if found := shutil.which("promtool"):
        return Path(found).parent
    if not shutil.which("apt-get"):
        pytest.skip("needs promtool (apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("debian")
    run(["apt-get", "download", "prometheus"], folder, DOWNLOAD_SECONDS)
    (package,) = folder.glob("*.deb")
    run(["dpkg", "-x", str(package), str(folder)])
    return folder / "usr" / "bin"


@pytest.fixture(scope="module")
def prometheus(
    programs: Path, cluster: ProcessCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the router and the workers that the router lists."""
    folder = tmp_path_factory.mktemp("prometheus")
    jobs = [
        {"job_name": "baton", "static_configs": [{"targets": [cluster.metrics]}]},
        {
            "job_name": "baton-workers",
            "http_sd_configs": [{"url": f"http://{cluster.http}/metrics/targets"}],
        },
    ]
    settings = folder / "prometheus.yaml"
    settings.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s"},
                "scrape_configs": jobs,
                "rule_files": [str(ALERTS)],
            }
        )
    )
    address = f"127.0.0.1:{free_port()}"
    started = Command(
        folder / "output",
        [
            str(programs / "prometheus"),
            f"--config.file={settings}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
    )
    yield f"http://{address}"
    started.end()


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
        ask(prometheus, query.replace("$__rate_interval", "1m"))


def ask(url: str, query: str) -> float | None:
    """The value of the query's first series, if it has one."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}).raise_for_status()
    series = answer.json()["data"]["result"]
    return float(series[0]["value"][1]) if series else None
