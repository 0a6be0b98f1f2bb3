"""One cluster with the embedded model, which all clients ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import ProcessCluster

from baton.core.model_store import EMBEDDED

SIZES: dict[str, object] = {"kv_memory": "256MiB"}


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    tree: dict[str, object] = {"prefill": SIZES, "decode": SIZES}
    with ProcessCluster(EMBEDDED, tmp_path_factory.mktemp("clients"), tree=tree) as running:
        yield running
        running.wait_idle()
