"""One cluster with the embedded model, which all clients ask, and Prometheus' programs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ProcessCluster

from baton.core.model_store import EMBEDDED
from examples import run

DOWNLOAD_SECONDS = 300
SIZES: dict[str, object] = {"kv_memory": "256MiB"}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    tree: dict[str, object] = {"prefill": SIZES, "decode": SIZES}
    with ProcessCluster(EMBEDDED, tmp_path_factory.mktemp("clients"), tree=tree) as running:
        yield running
        running.wait_idle()


@pytest.fixture(scope="session")
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
