from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import fault_table
import openai
import pytest
import recoveries
from network import Host, Network
from processes import ProcessCluster
from tiny_hub import TinyHub

from baton.core.model_store import EMBEDDED

SIZES: dict[str, object] = {"kv_memory": "512MiB", "threads": 1}
TREE: dict[str, object] = {"prefill": SIZES, "decode": SIZES}


CLUSTERS = contextlib.ExitStack()
"""Those that several files share."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """No cluster outlives the last test here: also an idle one takes CPU."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        CLUSTERS.close()


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> ProcessCluster:
    """The embedded model on one prefill and one decode worker."""
    cluster = ProcessCluster(EMBEDDED, tmp_path_factory.mktemp("embedded"), tree=TREE)
    return CLUSTERS.enter_context(cluster)


@pytest.fixture(scope="module")
def hub() -> Iterator[TinyHub]:
    made = TinyHub()
    yield made
    made.close()


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the embedded model's first layers."""
    from shallow_model import save_shallow_model  # imports torch, as below

    return save_shallow_model(tmp_path_factory.mktemp("model") / "shallow")


@pytest.fixture(scope="session")
def shallow_pair(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> ProcessCluster:
    """These on one prefill and one decode worker."""
    sizes: dict[str, object] = {"kv_memory": "64MiB", "threads": 1}
    tree: dict[str, object] = {"prefill": sizes, "decode": sizes}
    cluster = ProcessCluster(shallow, tmp_path_factory.mktemp("pair"), tree=tree)
    CLUSTERS.enter_context(cluster)
    CLUSTERS.callback(cluster.wait_idle)
    return cluster


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    # Imports transformers, which a process that only distributes the tests need not wait for.
    from tiny_models import TINY_MODELS, save

    folder = tmp_path_factory.mktemp("tiny")
    save(TINY_MODELS["llama"], folder)
    return folder


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two hosts; for tests on a network of their own."""
    with Network() as network:
        yield network


@pytest.fixture(scope="module")
def elsewhere(network: Network) -> Iterator[Host]:
    """A third host, which belongs to no cluster."""
    host = Host("elsewhere", 3)
    yield host
    host.end()


@pytest.fixture
def idle(embedded: ProcessCluster) -> Iterator[ProcessCluster]:
    """The embedded cluster; the test must leave its pools empty."""
    yield embedded
    embedded.wait_idle()


@pytest.fixture
def shallow_idle(shallow_pair: ProcessCluster) -> Iterator[ProcessCluster]:
    """As `idle`, of its first layers."""
    yield shallow_pair
    shallow_pair.wait_idle()


@pytest.fixture
def sdk(idle: ProcessCluster) -> Iterator[openai.OpenAI]:
    with idle.sdk() as client:
        yield client


@pytest.fixture
def shallow_sdk(shallow_idle: ProcessCluster) -> Iterator[openai.OpenAI]:
    with shallow_idle.sdk() as client:
        yield client


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the fault matrix and the recovery table, where they ran."""
    for title, table in (("fault matrix", fault_table), ("recoveries", recoveries)):
        if table.ROWS:
            terminalreporter.section(title)
            for line in table.render():
                terminalreporter.write_line(line)
