"""Two hosts and the network between them, on one machine: needs no privileges where user
namespaces are permitted.

    near ── 10.77.1.0/24 ── here ── 10.77.2.0/24 ── far

`here` is the namespace of this process, which must be one of its own: start it with ENTER in
front. It forwards between the two hosts until the network is cut; then packets between them
are dropped silently, while both can still be reached from here.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import pytest

ENTER = ["unshare", "--map-root-user", "--net", "--mount", "--mount-proc"]
# All processes in there end with it.
ENTER += ["--pid", "--fork", "--kill-child"]
_ENDS = ("sport", "dport")


def why_not() -> str:
    """Why namespaces are not available; empty when they are."""
    probe = "ip link add near type veth peer name far && mount -t sysfs sysfs /sys"
    try:
        run = subprocess.run([*ENTER, "sh", "-c", probe], capture_output=True, text=True)
    except FileNotFoundError as error:
        return str(error)
    return run.stderr.strip() if run.returncode else ""


def run_inside(file: Path) -> None:
    """Runs a file of tests in a namespace of its own; skips where there are none."""
    if reason := why_not():
        pytest.skip(f"needs user namespaces: {reason}")
    command = [*ENTER, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr


class Host:
    """A network namespace at `address`."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.subnet = f"10.77.{number}"
        self.address = f"{self.subnet}.2"
        # Where the kernel supports it, TCP retries every second, so a mended network is soon used.
        retry = "(echo 1000 > /proc/sys/net/ipv4/tcp_rto_max_ms) 2> /dev/null"
        # The processes of a host see its interfaces, and no others, in /sys.
        show = "mount -t sysfs sysfs /sys && echo ready && exec sleep infinity"
        command = ["unshare", "--net", "--mount", "sh", "-c", f"{retry}; {show}"]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        self._wire()

    @property
    def enter(self) -> list[str]:
        """The prefix of a command that runs it on this host."""
        return ["nsenter", "--target", str(self._holder.pid), "--net", "--mount", "--wd"]

    def end(self) -> None:
        self._holder.kill()
        self._holder.wait()

    def _wire(self) -> None:
        _ip(f"link add {self.name} type veth peer name eth0 netns {self._holder.pid}")
        _ip(f"address add {self.subnet}.1/24 dev {self.name}")
        _ip(f"link set {self.name} up")
        for line in (
            "link set lo up",
            f"address add {self.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.subnet}.1",
        ):
            _run([*self.enter, "ip", *line.split()])


class Network:
    def __enter__(self) -> Network:
        _ip("link set lo up")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        self.near, self.far = Host("near", 1), Host("far", 2)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for host in (self.near, self.far):
            host.end()

    def bytes_to(self, host: Host) -> int:
        """All bytes sent to a host, from here and from the other host."""
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == host.name:
                return int(counts.split()[8])
        raise AssertionError(f"there is no interface {host.name}")

    def cut(self) -> None:
        for host in (self.near, self.far):
            _ip(f"rule add iif {host.name} blackhole")

    def keep_out(self, host: Host) -> None:
        """Drops what comes from a host, as a firewall does."""
        _ip(f"rule add iif {host.name} blackhole")

    def mend(self) -> None:
        for host in (self.near, self.far):
            _ip(f"rule delete iif {host.name} blackhole")


def reaches(source: Host, target: Host, port: int) -> bool:
    """Whether a TCP connection from one host to another's port is accepted."""
    program = f"import socket; socket.create_connection(({target.address!r}, {port}), 2)"
    command = [*source.enter, sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True).returncode == 0


def own_loopback() -> None:
    """Prepares a namespace with nothing but loopback, where `cut_ports` works."""
    _ip("link set lo up")
    # Else the kernel delivers packets to this machine before it looks at another rule.
    _ip("rule add pref 100 lookup local")
    _ip("rule delete pref 0")


@contextmanager
def cut_ports(ports: Iterable[int]) -> Iterator[None]:
    """Drops all packets from and to TCP ports of loopback."""
    rules = [f"pref 10 ipproto tcp {end} {port} blackhole" for port in ports for end in _ENDS]
    with ExitStack() as mending:
        for rule in rules:
            _ip(f"rule add {rule}")
            mending.callback(_ip, f"rule delete {rule}")
        yield


def _ip(arguments: str) -> None:
    _run(["ip", *arguments.split()])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True)
