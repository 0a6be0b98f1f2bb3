"""The examples that need packages of their own: LangChain and Node.js."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from processes import ProcessCluster

from examples import EXAMPLES, run, run_python

PARIS = "The capital of France is Paris."


def test_langchain(cluster: ProcessCluster) -> None:
    first, second, *_, last = run_python("langchain_chat.py", f"http://{cluster.http}").splitlines()
    assert first == last == PARIS
    assert second.strip()


@pytest.mark.skipif(
    not shutil.which("npm"), reason="needs Node.js 18 or later with npm (apt-get install npm)"
)
def test_grpc_from_node(cluster: ProcessCluster, tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "node"
    shutil.copytree(EXAMPLES / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    shutil.copytree(EXAMPLES.parent / "proto", tmp_path / "proto")
    run(["npm", "install", "--no-audit", "--no-fund"], folder)
    printed = run(["node", "client.js", cluster.address], folder)
    assert printed.splitlines() == [PARIS, "FINISH_REASON_STOP"]
