"""`baton serve`: a whole cluster, from one command to Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.terminal import edge
from baton.cluster import preflight
from baton.core import config as configs
from baton.core import model_store
from baton.core.config import Config

if TYPE_CHECKING:
    from baton.cluster.launch import Cluster
    from baton.cluster.members import Member

# How often a serving cluster is looked at, to tell of processes that start again.
_WATCH_SECONDS = 1.0


def serve(
    config: Annotated[
        Path | None, typer.Option(help="A YAML file; flags override what it says.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face folder. (default: the embedded model)")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. (default: its folder's name)")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers. (default: 1)")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers. (default: 1)")] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(help="Processes that share the model in each worker. (default: 1)"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. (default: by device)")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda. (default: what is there)")
    ] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens a page. (default: 16)")] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(help='K/V memory of each worker, such as "2GiB". (default: by device)'),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            help="Share of a GPU's memory that a worker takes. (default: 0.9 of what it has)"
        ),
    ] = None,
    gpu_share: Annotated[
        float | None,
        typer.Option(help="Share of a GPU that prefill computes on, beside decode. (default: 1)"),
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(help="A shorter context than the model's.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens a prefill step. (default: by device)")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Requests a decode step. (default: by device)")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Where the router listens. (default: 127.0.0.1)")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The gRPC port. (default: 50051)")] = None,
    http_port: Annotated[int | None, typer.Option(help="The HTTP port. (default: 8000)")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="The Prometheus port. (default: 9400)")
    ] = None,
    routers: Annotated[
        int | None, typer.Option(help="Routers; the ports of each further one are one more.")
    ] = None,
    plan: Annotated[
        bool | None,
        typer.Option(
            "--plan", help="Have the pools follow the load; see `baton plan`. (default: no)"
        ),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="A file of API keys, see `baton keys`. (default: no keys)"),
    ] = None,
    tls: Annotated[
        Path | None,
        typer.Option(help="A folder of certificates, see `baton certs`. (default: no TLS)"),
    ] = None,
    client_certificates: Annotated[
        bool | None,
        typer.Option("--client-certificates", help="Have clients show a certificate."),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Let other machines in without keys or TLS."),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error. (default: info)")
    ] = None,
    ray_address: Annotated[
        str, typer.Option(help="A Ray cluster to join. (default: start a local one)")
    ] = "",
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return when it serves; see `baton stop`. Wants a Ray."),
    ] = False,
    name: Annotated[
        str,
        typer.Option(help="With --detach: one of this name that runs already is taken over."),
    ] = "",
    watch: Annotated[
        bool,
        typer.Option("--watch", help="With --detach: stay and tell what happens, until stopped."),
    ] = False,
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
    with edge():
        flags = {
            "model": model,
            "model_name": model_name,
            "prefill.workers": prefill,
            "gpu_memory": gpu_memory,
            "prefill.gpu_share": gpu_share,
            "prefill.kv_memory": kv_memory,
            "prefill.chunk_tokens": chunk_tokens,
            "prefill.tensor_parallel": tensor_parallel,
            "decode.workers": decode,
            "decode.kv_memory": kv_memory,
            "decode.max_batch": max_batch,
            "decode.tensor_parallel": tensor_parallel,
            "dtype": dtype,
            "device": device,
            "page_size": page_size,
            "max_context": max_context,
            "planner.enabled": plan,
            "router.count": routers,
            "router.host": host,
            "router.port": port,
            "router.http_port": http_port,
            "router.metrics_port": metrics_port,
            "router.keys": str(keys) if keys else None,
            "tls.folder": str(tls) if tls else None,
            "tls.client_certificates": client_certificates,
            "insecure": insecure,
            "log_level": log_level,
        }
        given = {path: value for path, value in flags.items() if value is not None}
        loaded = configs.load(config, given)
        preflight.check(loaded)
        if not name:  # else they may be those of the cluster that is there
            preflight.check_ports(loaded.router)
        _serve(loaded, _Where(ray_address, detach, name, watch))


@dataclass(frozen=True, slots=True)
class _Where:
    """Which Ray, and what becomes of the cluster."""

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
        typer.echo("the cluster goes on without this command")
    elif not stopped.is_set():
        typer.echo("stopping …  (requests under way may end; Ctrl-C again ends them at once)")
    else:
        hurry.set()
    stopped.set()


class _Stopped(Exception):
    """The signal to stop came while the cluster started."""


def _run(config: Config, where: _Where, stopped: threading.Event, hurry: threading.Event) -> None:
    typer.echo("starting Ray …")
    from baton.cluster.launch import Cluster

    cluster = Cluster(config, where.ray_address, detached=where.detach, name=where.name)
    progress = _Progress(stopped)
    try:
        router = cluster.start(progress)
        _tell(cluster, router, config)
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


def _tell(cluster: Cluster, router: Member, config: Config) -> None:
    if cluster.taken_over:
        typer.echo(f"{cluster.name} runs already; it goes on")
    if not cluster.as_configured:
        typer.echo("it keeps the configuration that it was started with, which is another one")
    typer.echo(_instructions(router, config, cluster.log_folder))
    for member in cluster.members():
        if not member.role and member.worker_id != router.worker_id:
            typer.echo(f"{member.worker_id} is at {member.address}\n")


def _watch(cluster: Cluster, progress: _Progress, stopped: threading.Event) -> None:
    """Until this command is told to stop, or the cluster is."""
    with contextlib.suppress(_Stopped):
        while not stopped.wait(_WATCH_SECONDS):
            progress(cluster.members())
            if cluster.is_gone:
                typer.echo(f"{cluster.name} was stopped")
                return


class _Progress:
    """Prints a line whenever a process gets further."""

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped
        self._began = time.monotonic()
        self._said: dict[str, str] = {}

    def __call__(self, members: list[Member]) -> None:
        if self._stopped.is_set():
            raise _Stopped
        for member in members:
            now = f"{member.progress}: {member.error}" if member.error else member.progress
            if self._said.get(member.worker_id) != now:
                self._said[member.worker_id] = now
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
    """What callers need."""
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
