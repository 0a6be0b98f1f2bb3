"""A cluster of real processes on loopback, started without Ray, as docs/OPERATIONS.md shows."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import signal
import socket
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import yaml
from forks import Forked, Started

from baton import Client
from baton.core.types import Role
from baton.v1 import cluster_pb2

if TYPE_CHECKING:
    import openai

START_SECONDS = 120.0
STOP_SECONDS = 60.0


class Process:
    """One process of the cluster; its output goes to a file."""

    def __init__(
        self, workspace: Path, name: str, arguments: list[str], before: Sequence[str] | None = None
    ) -> None:
        """`before` is a command prefix such as nsenter; None allows a fork."""
        self.name = name
        self._log = workspace / f"{name}.log"
        self._log.write_text("")
        self._process: Forked | Started = (
            Forked(arguments, self._log)
            if before is None
            else Started(before, arguments, self._log)
        )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, pattern: str) -> str:
        """The first group of `pattern`, once the process has printed it."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if match := re.search(pattern, self.log):
                return match[1]
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"{self.name} did not start:\n{self.log}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.kill(self.pid, number)

    def wait(self) -> int:
        code = self._process.wait(STOP_SECONDS)
        if code is None:
            self.kill()
            raise AssertionError(f"{self.name} did not stop:\n{self.log}")
        return code

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self._process.wait(STOP_SECONDS)


class ProcessCluster:
    """`prefill` + `decode` workers and a router, all serving `model`; of several models, keys by
    name, each has as many workers.

    `tree` is the YAML configuration; `per_worker` overrides it for single workers, and `before`
    prefixes their commands. The router follows a `controller` if its address is given, else it
    knows all workers. Workers of another `module` than Baton's find their role by their name.
    """

    def __init__(
        self,
        model: Path | str | dict[str, dict[str, object]],
        workspace: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        tree: dict[str, object] | None = None,
        per_worker: dict[str, dict[str, object]] | None = None,
        before: dict[str, list[str]] | None = None,
        wait_ready: bool = True,
        controller: str = "",
        module: str = "",
    ) -> None:
        self._module = module
        self.folder = workspace
        # In float32 a token does not depend on its batch, on any device. Tiny models repeat
        # themselves: with guesses an answer may end before a test has interrupted it.
        self._models = model if isinstance(model, dict) else {}
        served = {"models": self._models} if self._models else {"model": str(model)}
        self._tree: dict[str, object] = {
            **served,
            "dtype": "float32",
            "speculation": "off",
            **(tree or {}),
        }
        self._model_of: dict[str, str] = {}
        # Other load on the machine is other tests, not prompts of the same users.
        self._tree["decode"] = {"nice": 0, **self._section("decode")}
        self._per_worker = per_worker or {}
        # Kept by reference: a test may change how a worker starts again.
        self._before = {} if before is None else before
        self._wait_ready = wait_ready
        self._controller = controller
        self._counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        self.workers: dict[str, Process] = {}

    def __enter__(self) -> ProcessCluster:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for place, model in enumerate(self._models or [""]):
                for role, count in self._counts.items():
                    for index in range(place * count, (place + 1) * count):
                        self._model_of[f"{role.value}-{index}"] = model
                        self.start_worker(role, index)
            self.start_router()
        except BaseException:
            for worker in self.workers.values():
                worker.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        processes = [self.router, *self.workers.values()]
        for process in processes:
            process.send(signal.SIGTERM)
        codes = {process.name: process.wait() for process in processes}
        if error is None:
            failed = [f"{each.name}: {each.log}" for each in processes if codes[each.name]]
            assert not failed, "\n".join([str(codes), *failed])

    def start_worker(self, role: Role, index: int, port: int | None = None) -> Process:
        port = free_port() if port is None else port
        name = f"{role.value}-{index}"
        config = self._write_config(name, self._per_worker.get(name, {}))
        module = self._module or f"baton.{role.value}_worker"
        arguments = [module, "--config", config, "--name", name]
        ports = ["--port", str(port), "--metrics-port", "0"]
        if model := self._model_of.get(name):
            ports += ["--model", model]
        worker = Process(self.folder, name, [*arguments, *ports], self._how(role, name))
        self.workers[name] = worker
        return worker

    def _how(self, role: Role, name: str) -> Sequence[str] | None:
        """Who leaves the number of threads to the worker wants it as a user starts it."""
        return self._before.get(name, None if self._section(role.value).get("threads") else ())

    def restart(self, name: str) -> None:
        """Starts an ended worker again at its address, as Ray does."""
        port = int(self.workers[name].wait_for(r"ready on \S+:(\d+)"))
        self.workers[name].wait()
        role, _, index = name.partition("-")
        self.start_worker(Role(role), int(index), port).wait_for(r"ready on (\S+)")

    def worker_address(self, name: str) -> str:
        return self.workers[name].wait_for(r"ready on (\S+)")

    def client(self) -> Client:
        return Client(self.address)

    def sdk(self) -> openai.OpenAI:
        import openai  # the GPU tests run without it

        return openai.OpenAI(base_url=f"http://{self.http}/v1", api_key="none", max_retries=0)

    def metric(self, worker: str, name: str) -> float:
        """One of a worker's own metrics."""
        return scrape(self.workers[worker].wait_for(r"metrics on (\S+)"))[name]

    def wait_idle(self, seconds: float = 20.0) -> list[cluster_pb2.WorkerStatus]:
        """The workers' status, once every pool is empty and sound."""
        deadline = time.monotonic() + seconds
        with self.client() as client:
            while True:
                workers = list(client.status().workers)
                if all(_is_idle(worker) for worker in workers):
                    return workers
                assert time.monotonic() < deadline, f"pages were left behind:\n{workers}"
                time.sleep(0.1)

    def start_router(self) -> None:
        addresses = self._addresses("")
        members = {"members": {"workers": [] if self._controller else addresses}}
        if self._models:
            own = {name: {"workers": self._addresses(name)} for name in self._models}
            members = {
                "models": {name: {**self._models[name], "members": own[name]} for name in own}
            }
        # Nearly every test needs a transfer, even for short prompts.
        defaults = {
            "port": 0,
            "http_port": 0,
            "metrics_port": 0,
            "canary_seconds": 0.0,
            "local_prefill": "fallback",
        }
        config = self._write_config(
            "router",
            {
                "router": {**defaults, **self._section("router")},
                **members,
            },
        )
        arguments = ["baton.router", "--config", config, "--controller", self._controller]
        self.router = Process(self.folder, "router", arguments, self._before.get("router"))
        self.address = self.router.wait_for(r"gRPC on (\S+),")
        self.http = self.router.wait_for(r"HTTP on (\S+),")
        self.metrics = self.router.wait_for(r"metrics on (\S+)")
        if self._wait_ready:
            self._wait_connected()

    def _addresses(self, model: str) -> list[str]:
        """Of a model's workers; of all without a name."""
        own = (name for name in self.workers if model in ("", self._model_of.get(name)))
        return [self.worker_address(name) for name in own]

    def _wait_connected(self) -> None:
        """Returns when every prefill worker can push to every decode worker."""
        deadline = time.monotonic() + START_SECONDS
        with self.client() as client:
            while True:
                connected = sum(len(worker.connected) for worker in client.status().workers)
                if connected >= math.prod(self._counts.values()) * max(len(self._models), 1):
                    break
                assert time.monotonic() < deadline, "workers did not connect"
                time.sleep(0.02)
            client.wait_ready(timeout=START_SECONDS)

    def _section(self, name: str) -> dict[str, object]:
        section = self._tree.get(name, {})
        assert isinstance(section, dict)
        return section

    def _write_config(self, name: str, changes: dict[str, object]) -> str:
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**self._tree, **changes}))
        return str(path)


@contextlib.contextmanager
def second_router(workspace: Path, before: list[str]) -> Iterator[str]:
    """The address of a router beside the cluster's own, of another version."""
    arguments = ["baton.router", "--config", str(workspace / "router.yaml")]
    router = Process(workspace, "second-router", arguments, before)
    try:
        yield router.wait_for(r"gRPC on (\S+),")
    finally:
        router.send(signal.SIGTERM)
        assert router.wait() == 0


# Each process of pytest begins elsewhere, also those of two runs at once.
_FIRST_PORT = 20_000 + 2_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_ports = itertools.count(_FIRST_PORT + os.getpid() * 61 % 1_500)


def free_port() -> int:
    """A port outside the kernel's ephemeral range: a restarted worker finds it free."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("unreachable")


def scrape_text(address: str) -> str:
    """A process's metrics as it serves them."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text: str = response.read().decode()
    return text


def scrape(address: str, label: str = "") -> dict[str, float]:
    """A process's metrics by name, summed over labels; with `label`, by its value too."""
    totals: defaultdict[str, float] = defaultdict(float)
    for line in scrape_text(address).splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            totals[name] += float(value)
            if found := re.search(f'{label}="(.*?)"', series) if label else None:
                totals[f"{name} {found[1]}"] += float(value)
    return dict(totals)


def _is_idle(worker: cluster_pb2.WorkerStatus) -> bool:
    load = worker.load
    return (
        not worker.fault
        and not worker.active_requests
        and load.free_pages == worker.total_pages
        and not (load.waiting or load.running or load.leased_pages or load.quarantined_pages)
    )
