"""Starts one worker without Ray: `python -m baton.prefill_worker|decode_worker --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from baton.core import config as configs
from baton.core.config import Config
from baton.core.errors import BatonError, InvalidConfig
from baton.core.process import (
    StartTimes,
    limit_end,
    no_collections,
    process_began,
    set_up_logging,
    start_unless_stopped,
    stop_on_signals,
)
from baton.core.types import Role
from baton.worker.resources import claim_threads
from baton.worker.step_record import StepRecord, open_record

if TYPE_CHECKING:
    from baton.worker.worker_server import WorkerServer


def main(role: Role) -> None:
    """Runs until SIGTERM or SIGINT, which drain the worker; a second one ends it at once."""
    times = StartTimes(process_began())
    arguments = _parse(role)
    try:
        config = _select_model(configs.load(arguments.config), arguments.model)
        set_up_logging(config.log_level)
        claim_threads(config, role)
        times.mark("command")
        port = config.pool(role).port if arguments.port is None else arguments.port
        record = _open_record(config, role, port)
        with no_collections():
            from baton.worker.worker_server import WorkerServer

        worker_id = arguments.name or f"{role.value}-0"
        server = WorkerServer(config, role, worker_id, times=times, record=record)
        uvloop.run(_run(server, config, role, port, arguments.metrics_port))
    except BatonError as error:
        sys.exit(f"{role.value}_worker: {error.message}")


def _parse(role: Role) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{role.value}_worker", description=__doc__)
    parser.add_argument("--config", type=Path, help="a YAML file (default: the built-in defaults)")
    parser.add_argument("--name", help=f"the worker's name, unique in the cluster ({role.value}-0)")
    parser.add_argument("--model", default="", help="which of the file's models to serve")
    parser.add_argument("--port", type=int, help=f"overrides {role.value}.port")
    parser.add_argument("--metrics-port", type=int, help="serve Prometheus metrics on this port")
    return parser.parse_args()


def _select_model(config: Config, name: str) -> Config:
    """Returns the configuration of one model of a file with several."""
    if not config.models and not name:
        return config
    if name not in config.models:
        served = ", ".join(map(repr, config.models)) or "none by name"
        raise InvalidConfig(f"--model must be one of the file's models: {served}", field="models")
    return configs.model_config(config, name, config.models[name])


def _open_record(config: Config, role: Role, port: int) -> StepRecord:
    """Opens a record with the worker's address as scope, which a restart does not change."""
    return open_record(f"{config.pool(role).host}:{port}") if port else StepRecord()


async def _run(
    server: WorkerServer, config: Config, role: Role, port: int, metrics_port: int | None
) -> None:
    stopping = stop_on_signals()
    start = server.start(config.pool(role).host, port, metrics_port)
    await start_unless_stopped(start, stopping)
    if server.metrics_address:
        print(f"metrics on {server.metrics_address}", flush=True)
    print(f"started in {server.times}", flush=True)
    print(f"{role.value} worker ready on {server.address}", flush=True)
    await asyncio.gather(server.serve_until(stopping), _limit_end(server, config.drain_seconds))


async def _limit_end(server: WorkerServer, drain_seconds: float) -> None:
    await server.drain_asked()
    limit_end(drain_seconds)
