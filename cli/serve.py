"""`baton serve`: a whole cluster, from one command to Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from baton.cli.terminal import option, with_flags
from baton.cluster import preflight
from baton.core import config as configs
from baton.core import model_store
from baton.core.config import Config, Size
from baton.core.config_values import keys_of

if TYPE_CHECKING:
    from baton.cluster.fleet import Member
    from baton.cluster.launch import Cluster

# Between two looks at a serving cluster, to report restarts.
_WATCH_SECONDS = 1.0


_PATHS: dict[str, list[str]] = {}
"""The keys that each flag sets."""


def _config_flags() -> dict[str, Any]:
    """The type and help of each flag, from the configuration's keys."""
    flags: dict[str, Any] = {}
    for key in keys_of(Config):
        name = key.flag.removeprefix("--").replace("-", "_")
        if not name:
            continue
        _PATHS.setdefault(name, []).append(key.path)
        shown = key.default and not isinstance(key.default, bool)
        help_text = f"{key.meaning} (default: {key.default})" if shown else key.meaning
        kind = str if key.type is Size else key.type
        flags[name] = option(kind, help_text, key.flag)
    return flags


@with_flags(_config_flags())
def serve(
    config: Path | None = Option(None, help="A YAML file; flags override its keys."),
    *,
    ray_address: str = Option("", help="A Ray cluster to join. (default: start a local one)"),
    detach: bool = Option(
        False, "--detach", help="Return when it serves; see `baton stop`. Needs a Ray."
    ),
    name: str = Option("", help="With --detach: take over a running cluster of this name."),
    watch: bool = Option(
        False, "--watch", help="With --detach: stay and report progress until stopped."
    ),
    **flags: Any,
) -> None:
    """Start a cluster: prefill workers, decode workers, a router. Ctrl-C stops it."""
    if detach and not ray_address:
        raise typer.BadParameter(
            "a Ray that is started here would end with this command: give --ray-address",
            param_hint="--detach",
        )
    if (name or watch) and not detach:
        raise typer.BadParameter(
            "only a cluster that outlives this command can be found again: give --detach",
            param_hint="--name" if name else "--watch",
        )
    given = {flag: value for flag, value in flags.items() if value is not None}
    keys = {path: value for flag, value in given.items() for path in _PATHS[flag]}
    loaded = configs.load(config, keys)
    preflight.check(loaded)
    if not name:  # else they may be those of the running cluster
        preflight.check_ports(loaded.router)
    _serve(loaded, _Where(ray_address, detach, name, watch))


@dataclass(frozen=True, slots=True)
class _Where:
    """Which Ray, and whether the cluster outlives this command."""

    ray_address: str
    detach: bool
    name: str
    watch: bool


def _serve(config: Config, where: _Where) -> None:
    stopped, hurry = threading.Event(), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _stop(stopped, hurry, where))
    # Not on this thread: Ray would take its signals.
    with ThreadPoolExecutor(max_workers=1) as threads:
        threads.submit(_run, config, where, stopped, hurry).result()


def _stop(stopped: threading.Event, hurry: threading.Event, where: _Where) -> None:
    if where.watch:
        typer.echo("the cluster keeps running without this command")
    elif not stopped.is_set():
        typer.echo("stopping …  (running requests may end; Ctrl-C again ends them at once)")
    else:
        hurry.set()
    stopped.set()


class _Stopped(Exception):
    """A signal to stop came during the start."""


def _run(config: Config, where: _Where, stopped: threading.Event, hurry: threading.Event) -> None:
    typer.echo("starting Ray …")
    from baton.cluster.launch import Cluster

    cluster = Cluster(config, where.ray_address, detached=where.detach, name=where.name)
    progress = _Progress(stopped)
    try:
        router = cluster.start(progress)
        _introduce(cluster, router, config)
        if where.detach:
            typer.echo(f"`baton stop {cluster.name} --ray-address {where.ray_address}` stops it.")
            if where.watch:
                _watch(cluster, progress, stopped)
            cluster.leave()
            return
        typer.echo("Ctrl-C stops it.\n")
        while not stopped.wait(_WATCH_SECONDS):
            progress(cluster.members())
    except _Stopped:
        pass
    finally:
        cluster.stop(hurry)


def _introduce(cluster: Cluster, router: Member, config: Config) -> None:
    if cluster.taken_over:
        typer.echo(f"{cluster.name} runs already; it keeps running")
    if not cluster.as_configured:
        typer.echo("it keeps the configuration that it was started with, which differs")
    typer.echo(_instructions(router, config, cluster.log_folder))
    for member in cluster.members():
        if not member.role and member.worker_id != router.worker_id:
            typer.echo(f"{member.worker_id} is at {member.address}\n")


def _watch(cluster: Cluster, progress: _Progress, stopped: threading.Event) -> None:
    """Until this command or the cluster is stopped."""
    with contextlib.suppress(_Stopped):
        while not stopped.wait(_WATCH_SECONDS):
            progress(cluster.members())
            if cluster.is_gone:
                typer.echo(f"{cluster.name} was stopped")
                return


class _Progress:
    """Prints a line at each progress of a process."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped
        self._began = time.monotonic()
        self._printed: dict[str, str] = {}

    def __call__(self, members: list[Member]) -> None:
        if self._stopped.is_set():
            raise _Stopped
        for member in members:
            now = f"{member.progress}: {member.error}" if member.error else member.progress
            if self._printed.get(member.worker_id) != now:
                self._printed[member.worker_id] = now
                seconds = time.monotonic() - self._began
                typer.echo(f"{seconds:6.1f} s  {member.worker_id:<12} {now}")


def _instructions(router: Member, config: Config, log_folder: str) -> str:
    scheme = "https" if config.tls.folder else "http"
    return f"""
Baton serves {model_store.model_name(config)}.
{_lock_instructions(config)}
  ask          baton generate --address {router.address} "What is the capital of France?"
  chat         baton chat --address {router.address}
  look         baton status --address {router.address}
  Python       from baton import Client; Client("{router.address}").chat([("user", "Hello")]).text
{_http_instructions(router, scheme)}  gRPC         {router.address} (reflection is on)
  metrics      {scheme}://{router.metrics}/metrics
  logs         {log_folder}
"""


def _lock_instructions(config: Config) -> str:
    """What clients must set first."""
    lines = []
    if config.router.keys:
        lines.append("  first        export BATON_API_KEY=…          (a key of `baton keys add`)\n")
    if config.tls.folder:
        lines.append(f"  first        export BATON_TLS={config.tls.folder}\n")
    return "\n" + "".join(lines) if lines else ""


def _http_instructions(router: Member, scheme: str) -> str:
    if not router.http:
        return ""
    url = f"{scheme}://{router.http}/v1"
    return f"""\
  page         {scheme}://{router.http}/
  curl         curl {url}/chat/completions -H "content-type: application/json" \\
                 -d '{{"messages": [{{"role": "user", "content": "Hello"}}]}}'
  OpenAI       OpenAI(base_url="{url}", api_key="none")
"""
