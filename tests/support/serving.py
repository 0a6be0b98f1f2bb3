"""`baton serve` as a user runs it: a command in its own session, and all it starts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import yaml
from typer.testing import CliRunner

from baton import Client, Unavailable
from baton.cli.app import app
from baton.cli.exposure import listeners
from baton.v1 import cluster_pb2, worker_pb2

BATON = str(Path(sys.executable).with_name("baton"))
FREE_PORTS = ["--port", "0", "--http-port", "0", "--metrics-port", "0"]
# The longest that a start or an end may take on a busy machine, before it counts as hanging.
START_SECONDS = STOP_SECONDS = 120.0
# How long the kernel may take to reap killed processes.
GONE_SECONDS = 5.0
# A suite under nohup passes its ignored SIGHUP on, and `baton serve` would leave it ignored.
_AS_IN_A_TERMINAL = ["env", "--default-signal=HUP"]


class Command:
    """A command in its own session. Its stdout and stderr go to files."""

    def __init__(
        self, workspace: Path, arguments: list[str], environment: dict[str, str] | None = None
    ) -> None:
        workspace.mkdir(parents=True, exist_ok=True)
        self._stdout, self._stderr = workspace / "stdout", workspace / "stderr"
        self.began = time.monotonic()
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self._popen = subprocess.Popen(
                [*_AS_IN_A_TERMINAL, *arguments],
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        self.pid = self._popen.pid

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait_for(self, pattern: str, count: int = 1) -> str:
        """What the command has printed, once `pattern` is in it `count` times."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._popen.poll() is None:
            if len(re.findall(pattern, self.stdout)) >= count:
                return self.stdout
            time.sleep(0.05)
        raise AssertionError(f"{pattern!r} did not come:\n{self.stdout}\n{self.stderr}")

    def send(self, number: signal.Signals) -> None:
        """SIGINT goes to the whole group, as a terminal's Ctrl-C does."""
        if number is signal.SIGINT:
            os.killpg(self.pid, number)
        else:
            self._popen.send_signal(number)

    def send_until_the_end(self, number: signal.Signals) -> None:
        """Sends it every few milliseconds, until the command has ended."""
        deadline = time.monotonic() + STOP_SECONDS
        while self._popen.poll() is None:
            assert time.monotonic() < deadline, "it did not end"
            self.send(number)
            time.sleep(0.003)

    def wait(self) -> int:
        """The exit code."""
        return self._popen.wait(STOP_SECONDS)

    def processes(self) -> dict[int, str]:
        """Every live process of the session, by its title."""
        return processes_of(self.pid)

    def wait_gone(self, seconds: float = GONE_SECONDS) -> None:
        """Returns when no process of the session is left."""
        deadline = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)

    def end(self) -> None:
        """Kills everything that is left."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self._popen.wait()


MODEST: dict[str, object] = {"prefill": {"threads": 1}, "decode": {"threads": 1, "nice": 0}}
"""Workers that share the machine with other tests: these would have decode wait, and threads that
wait for one another."""


def _modest(workspace: Path) -> Path:
    workspace.mkdir(parents=True, exist_ok=True)
    config = workspace / "modest.yaml"
    config.write_text(yaml.safe_dump(MODEST))
    return config


class Serve(Command):
    """One `baton serve`, on free ports; usable as soon as `ready` has returned."""

    def __init__(
        self,
        workspace: Path,
        *flags: str,
        environment: dict[str, str] | None = None,
        modest: bool = True,
        before: Sequence[str] = (),
    ) -> None:
        """`modest` workers use few resources beside other tests, if no file is given. `before` is a
        command prefix such as nsenter."""
        if modest and "--config" not in flags:
            flags = ("--config", str(_modest(workspace)), *flags)
        super().__init__(workspace, [*before, BATON, "serve", *FREE_PORTS, *flags], environment)

    def __enter__(self) -> Serve:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def ready(self) -> Serve:
        self.wait_for("Ctrl-C stops it")
        return self

    @property
    def address(self) -> str:
        found = re.search(r"gRPC +(\S+)", self.stdout)
        assert found
        return found[1]

    def client(self) -> Client:
        return Client(self.address)

    def ask(self, *arguments: str) -> str:
        """The output of `baton …` against this cluster, run in this process: as one of its own, a
        command takes a second."""
        ended = CliRunner().invoke(app, [*arguments, "--address", self.address])
        if ended.exit_code:
            raise subprocess.CalledProcessError(
                ended.exit_code, arguments, ended.stdout, ended.stderr
            )
        return ended.stdout

    def actor(self, title: str) -> int:
        """The process of the actor with this title, such as "RouterActor"."""
        (pid,) = [pid for pid, line in self.processes().items() if line == f"ray::{title}"]
        return pid

    def ray_head(self) -> int:
        """The process of Ray's GCS."""
        (pid,) = [pid for pid, line in self.processes().items() if "/gcs_server " in line]
        return pid

    def worker(self, name: str) -> int:
        """The process of a worker, found by its port."""
        with self.client() as client:
            addresses = {
                item.member.worker_id: item.member.address for item in client.status().workers
            }
        port = int(addresses[name].rpartition(":")[2])
        (pid,) = [pid for pid in self.processes() if port in listening_ports(pid)]
        return pid

    def wait_pools(self, prefill: int, decode: int) -> None:
        """Returns when the controller reports these wanted sizes and all workers serve."""
        deadline = time.monotonic() + START_SECONDS
        with self.client() as client:
            while not _are_pools(client, prefill, decode):
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def wait_whole(self, workers: int = 2) -> list[cluster_pb2.WorkerStatus]:
        """The workers, once all are attached, prefill reaches decode, and every pool is empty."""
        deadline = time.monotonic() + START_SECONDS
        with self.client() as client:
            client.wait_ready(START_SECONDS)
            while True:
                found = list(client.status().workers)
                if len(found) == workers and all(_is_whole(item) for item in found):
                    return found
                assert time.monotonic() < deadline, found
                time.sleep(0.1)


def _are_pools(client: Client, prefill: int, decode: int) -> bool:
    try:
        pools = client.pools()
    except Unavailable:
        return False
    wanted = (pools.prefill, pools.decode) == (prefill, decode)
    return wanted and [worker.ready for worker in pools.workers] == [True] * (prefill + decode)


def _is_whole(worker: cluster_pb2.WorkerStatus) -> bool:
    return (
        worker.attached
        and not worker.fault
        and (bool(worker.connected) or worker.member.role == worker_pb2.ROLE_DECODE)
        and worker.load.free_pages == worker.total_pages
    )


def run(workspace: Path, *flags: str) -> Command:
    """Runs a `baton serve` that ends by itself."""
    command = Command(workspace, [BATON, "serve", *flags])
    try:
        command.wait()
        return command
    finally:
        command.wait_gone()


def processes_of(session: int) -> dict[int, str]:
    """Every live process of a session, by its title.

    Ray moves its processes to other groups and other parents, but not to other sessions.
    """
    return {pid: _command_line(pid) for pid in _pids() if _session(pid) == session}


def pids_of(session: int, title: str) -> list[int]:
    """The processes of a session whose titles begin so."""
    return [pid for pid, line in processes_of(session).items() if line.startswith(title)]


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _session(pid: int) -> int:
    """The session of a process; 0 when it has ended."""
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if state == "Z" else int(session)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def listening_ports(pid: int) -> set[int]:
    """The TCP ports that a process listens on; none when it has ended."""
    return {port for _, port in listeners(pid)}


def thread_ticks(pid: int) -> dict[int, int]:
    """The CPU time of each thread of a process, in kernel ticks."""
    ticks = {}
    for entry in Path(f"/proc/{pid}/task").iterdir():
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        ticks[int(entry.name)] = int(fields[11])
    return ticks
