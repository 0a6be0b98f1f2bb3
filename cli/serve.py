"""`baton serve`: runs a whole cluster until Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import math
import os
import queue
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer import Option

from baton.cli.terminal import option, say, with_flags
from baton.cluster import ports, preflight
from baton.core import config as configs
from baton.core import model_store
from baton.core.config import Config, Size
from baton.core.config_values import keys_of
from baton.core.generation_defaults import read_defaults
from baton.core.process import StartTimes, end_after, process_began

if TYPE_CHECKING:
    from baton.cluster.fleet import Member
    from baton.cluster.launch import Cluster

# Between two checks of a serving cluster, to report restarts.
_WATCH_SECONDS = 1.0

# The longest that a stop takes whose requests end at once, unless it hangs.
_NOW_SECONDS = 30.0

# From the end of Ray's own processes to the end of this one. An orderly stop ends them last.
_AFTER_RAY_SECONDS = 10.0

# Added to the time of a stop, in case Ray holds Python's lock and the main thread cannot run.
_LOCKED_SECONDS = 10.0


_PATHS: dict[str, list[str]] = {}
"""The configuration keys that each flag sets."""


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
        if key.path == "model":
            kind, help_text = list[str], f"{help_text} Repeatable: several models are served."
        flags[name] = option(kind, help_text, key.flag)
    return flags


@with_flags(_config_flags())
def serve(
    config: Path | None = Option(None, help="A YAML file; flags override its keys."),
    *,
    ray_address: str = Option("", help="A Ray cluster to join. (default: start a local one)"),
    detach: bool = Option(
        False, "--detach", help="Return once it serves; see `baton stop`. Needs --ray-address."
    ),
    name: str = Option("", help="With --detach: take over a running cluster of this name."),
    adapter: list[str] = Option(
        [],
        metavar="NAME=PATH",
        help="Serve a LoRA adapter: a PEFT folder or a hub's ORG/REPOSITORY. Repeatable.",
    ),
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
    loaded = configs.load(config, _with_models(keys))
    if adapter and loaded.models:
        raise typer.BadParameter("with several models, set `adapters` in the file's `models`")
    if adapter:
        adapters = {**loaded.adapters, **dict(map(_named_path, adapter))}
        loaded = dataclasses.replace(loaded, adapters=adapters)
    prepared = preflight.prepare(loaded, workers_here=not ray_address)
    if not name:  # a running cluster of this name may use them
        ports.check_ports(prepared.router)
    _Session(prepared, ray_address, detach, name, watch).serve()


def _with_models(keys: dict[str, object]) -> dict[str, object]:
    """Returns the keys with `model`, or with `models` by name if several are given."""
    given = keys.pop("model", None)
    if not isinstance(given, list) or not given:
        return keys
    if len(given) == 1:
        return {**keys, "model": given[0]}
    names = [model_store.model_name(Config(model=each)) for each in given]
    if len(set(names)) < len(names):
        raise typer.BadParameter(
            f"two models have the name {max(names, key=names.count)!r}; name them in a file's"
            " `models`",
            param_hint="--model",
        )
    models = {name: {"model": each} for name, each in zip(names, given, strict=True)}
    return {**keys, "models": models}


def _named_path(adapter: str) -> tuple[str, str]:
    name, separator, path = adapter.partition("=")
    if not (name and separator and path):
        raise typer.BadParameter(f"{adapter!r} is not NAME=PATH", param_hint="--adapter")
    return name, path


class _Stopped(Exception):
    """Raised after a signal to stop."""


@dataclass(slots=True)
class _Session:
    """Starts a cluster, reports its progress, and stops or leaves it.

    The main thread handles signals and limits the time of the stop; another one does the rest.

        1st signal  requests may end within drain_seconds
        2nd signal  requests end at once
        3rd signal, or a stop that takes too long, or Ray has ended
                    all processes are killed
    """

    config: Config
    ray_address: str
    detach: bool
    name: str
    watch: bool
    cluster: Cluster | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    stop_now: threading.Event = field(default_factory=threading.Event)
    hung_up: bool = False
    ends_by: float = math.inf  # in time.monotonic's seconds; then everything is killed
    printed: dict[str, str] = field(default_factory=dict)  # progress of each process
    began: float = field(default_factory=time.monotonic)
    times: StartTimes = field(default_factory=lambda: StartTimes(process_began()))

    def serve(self) -> None:
        # Handlers only put into it: a lock or a print could be interrupted by the next signal.
        signals: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, lambda number, _: signals.put(number))
        # Not on this thread: Ray would take its signals.
        threads = ThreadPoolExecutor(max_workers=1)
        running = threads.submit(self._run)
        threads.shutdown(wait=False)
        running.add_done_callback(lambda _: signals.put(None))
        self._supervise(running, signals)
        self._ignore(numbers)
        running.result()

    @staticmethod
    def _ignore(numbers: list[signal.Signals]) -> None:
        """Leaves the exit code to this process: all has ended, and Python's end restores the
        defaults, with which a late signal would kill it."""
        end_after(_NOW_SECONDS)
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)

    def _supervise(self, running: Future[None], signals: queue.SimpleQueue[int | None]) -> None:
        while not running.done():
            # Bounded: a signal that another thread receives does not wake this one.
            with contextlib.suppress(queue.Empty):
                if number := signals.get(timeout=_WATCH_SECONDS):
                    self._handle(number)
            if self.cluster and self.cluster.has_lost_ray:
                self._end_within(_AFTER_RAY_SECONDS)
            if self.ends_by < math.inf and not running.done():
                self._limit(self.ends_by - time.monotonic())

    def _handle(self, number: int) -> None:
        """Counts the end of the terminal once: the kernel and a shell may both tell of it."""
        if number == signal.SIGHUP:
            if self.hung_up:
                return
            self.hung_up = True
        self._stop()

    def _stop(self) -> None:
        """Handles a signal that counts."""
        if self.watch:
            said, seconds = "the cluster keeps running without this command", _NOW_SECONDS
        elif not self.stopped.is_set():
            drain = f"{self.config.drain_seconds:g} s"
            said = f"stopping …  (requests may run for {drain}; Ctrl-C again ends them at once)"
            seconds = self.cluster.stop_seconds if self.cluster else _NOW_SECONDS
        elif not self.stop_now.is_set():
            self.stop_now.set()
            said = "ending all requests …  (Ctrl-C again kills all processes)"
            seconds = _NOW_SECONDS
        else:
            said, seconds = "killing all processes …", 0.0
        self.stopped.set()
        self._end_within(seconds)
        say(said)

    def _end_within(self, seconds: float) -> None:
        self.ends_by = min(self.ends_by, time.monotonic() + seconds)

    def _limit(self, seconds: float) -> None:
        if seconds <= 0:
            self._kill()
        # Ray's processes end with this one.
        end_after(seconds + _LOCKED_SECONDS)

    def _kill(self) -> NoReturn:
        """Ends this process and, if it has started Ray, all of Ray's."""
        cluster = self.cluster
        if cluster is None:  # it is importing Ray, and has no other process
            os._exit(1)
        lost_ray = cluster.has_lost_ray
        if not lost_ray:
            faulthandler.dump_traceback()
        cluster.kill()
        reason = "Ray has ended" if lost_ray else "the cluster did not stop in time"
        left = f"processes may run on at {self.ray_address}" if self.ray_address else "all killed"
        say(f"baton: {reason}; {left}{cluster.logs}", err=True)
        os._exit(0 if lost_ray and self.stopped.is_set() else 1)

    def _run(self) -> None:
        self.times.mark("command")
        say("starting Ray …")
        from baton.cluster.launch import Cluster

        cluster = Cluster(self.config, self.ray_address, detached=self.detach, name=self.name)
        self.cluster = cluster
        try:
            members = cluster.start(self._print_progress)
            self.times.mark("workers and router")
            self._introduce(cluster, members)
            if self.watch or not self.detach:
                self._follow(cluster)
            if self.detach:
                cluster.leave()
        except _Stopped:
            pass
        finally:
            self._end_within(cluster.stop_seconds)
            cluster.stop(self.stop_now)

    def _introduce(self, cluster: Cluster, members: list[Member]) -> None:
        from baton.cluster.launch import routers

        first, *others = routers(members)
        if cluster.taken_over:
            say(f"{cluster.name} is already running and keeps running")
        if not cluster.as_configured:
            say("it keeps the configuration that it was started with, which differs")
        say(instructions(first, self.config, cluster.log_folder))
        say(f"Started in {self.times}")
        for member in members:
            if member.started:
                say(f"  {member.worker_id:<12} {member.started}")
        for router in others:
            say(f"{router.worker_id} is at {router.address}\n")
        if self.detach:
            say(f"`baton stop {cluster.name} --ray-address {self.ray_address}` stops it.")
        else:
            say("Ctrl-C stops it.\n")

    def _follow(self, cluster: Cluster) -> None:
        """Prints progress until this command or the cluster is stopped."""
        with contextlib.suppress(_Stopped):
            while not self.stopped.wait(_WATCH_SECONDS):
                self._print_progress(cluster.members())
                if self.watch and cluster.is_gone:
                    say(f"{cluster.name} was stopped")
                    return

    def _print_progress(self, members: list[Member]) -> None:
        """Prints a line for each process that progressed. `members` is empty until Ray runs."""
        if self.stopped.is_set():
            raise _Stopped
        if not members:
            self.times.mark("Ray")
        for member in members:
            now = f"{member.progress}: {member.error}" if member.error else member.progress
            if self.printed.get(member.worker_id) != now:
                self.printed[member.worker_id] = now
                seconds = time.monotonic() - self.began
                say(f"{seconds:6.1f} s  {member.worker_id:<12} {now}")


def instructions(router: Member, config: Config, log_folder: str) -> str:
    """What is printed once the cluster serves. Its commands can be pasted."""
    scheme = "https" if config.tls.folder else "http"
    models = configs.served_configs(config)
    name = model_store.model_name(models[0]) if len(models) > 1 else ""  # one must be named then
    flag, argument = (f" --model {name}", f', model="{name}"') if name else ("", "")
    called = f'Client("{router.address}").chat([("user", "Hello")]{argument})'
    notes = "".join(f"{_engine_note(each)}{_default_instructions(each)}" for each in models)
    return f"""
Baton serves {", ".join(map(model_store.model_name, models))}.
{notes}{_lock_instructions(config)}
  ask          baton generate --address {router.address}{flag} "What is the capital of France?"
  chat         baton chat --address {router.address}{flag}
  look         baton status --address {router.address}
  Python       from baton import Client; {called}.text
{_http_instructions(router, scheme, name)}  gRPC         {router.address} (reflection is on)
  metrics      {scheme}://{router.metrics}/metrics
  logs         {log_folder}
"""


def _engine_note(config: Config) -> str:
    """One line on the cost of a model without a native engine, or of pages in int4."""
    note = preflight.engine_note(config)
    return f"{note}\n" if note else ""


def _default_instructions(config: Config) -> str:
    """The model's defaults for requests, in one line."""
    folder = model_store.locate(config.model, weights=False)
    shown = str(read_defaults(folder, config.router.generation_config))
    off = "--generation-config none serves without"
    return f"Its defaults for requests: {shown}. ({off})\n" if shown else ""


def _lock_instructions(config: Config) -> str:
    """What clients must set first."""
    lines = []
    if config.router.keys:
        lines.append("  first        export BATON_API_KEY=…          (a key of `baton keys add`)\n")
    if config.tls.folder:
        lines.append(f"  first        export BATON_TLS={config.tls.folder}\n")
    return "\n" + "".join(lines) if lines else ""


def _http_instructions(router: Member, scheme: str, model: str) -> str:
    if not router.http:
        return ""
    named = f'"model": "{model}", ' if model else ""
    url = f"{scheme}://{router.http}/v1"
    return f"""\
  page         {scheme}://{router.http}/
  curl         curl {url}/chat/completions -H "content-type: application/json" \\
                 -d '{{{named}"messages": [{{"role": "user", "content": "Hello"}}]}}'
  OpenAI       OpenAI(base_url="{url}", api_key="none")
"""
