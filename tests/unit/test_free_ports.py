"""Ports that are chosen before anybody listens on them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.cluster import ports
from baton.core.errors import Unavailable

HOST = "127.0.0.1"
ANOTHER = """
import sys
from baton.cluster import ports
ports._FREE_PORTS = range(int(sys.argv[1]), int(sys.argv[1]) + 3)
print(ports.free_port("127.0.0.1"), flush=True)
sys.stdin.read()
"""


def test_no_port_is_given_twice_while_its_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    first = 23_917  # outside the range, so that no cluster of another test takes one
    monkeypatch.setattr(ports, "_FREE_PORTS", range(first, first + 3))
    monkeypatch.setattr(ports, "_reservations", [])
    with subprocess.Popen(
        [sys.executable, "-c", ANOTHER, str(first)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as another:
        assert another.stdout
        assert another.stdin
        theirs = int(another.stdout.readline())
        ours = {ports.free_port(HOST), ports.free_port(HOST)}
        assert ours | {theirs} == set(range(first, first + 3))
        with pytest.raises(Unavailable, match="no port"):
            ports.free_port(HOST)
        another.stdin.close()
        another.wait()
    assert ports.free_port(HOST) == theirs
