"""A real Prometheus that scrapes a cluster as docs/OPERATIONS.md says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from processes import free_port
from serving import Command


@contextmanager
def prometheus_server(
    programs: Path, folder: Path, metrics: str, http: str, rules: Path
) -> Iterator[str]:
    """Its URL. It scrapes a router, at its addresses for metrics and HTTP, and the workers that the
    router lists, once a second."""
    settings = folder / "prometheus.yaml"
    settings.write_text(yaml.safe_dump(_settings(metrics, http, rules)))
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
    try:
        yield f"http://{address}"
    finally:
        started.end()


def _settings(metrics: str, http: str, rules: Path) -> dict[str, object]:
    targets = f"http://{http}/metrics/targets"
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [
            {"job_name": "baton", "static_configs": [{"targets": [metrics]}]},
            {
                "job_name": "baton-workers",
                "http_sd_configs": [{"url": targets, "refresh_interval": "1s"}],
            },
        ],
        "rule_files": [str(rules)],
    }
