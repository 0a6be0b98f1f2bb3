"""Starts a router without Ray: `python -m baton.router --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import uvloop

from baton.core import config as configs
from baton.core.config import Config
from baton.core.errors import BatonError
from baton.core.process import (
    StopSignal,
    limit_end,
    set_up_logging,
    settle_memory,
    start_unless_stopped,
    stop_on_signals,
)
from baton.router.server import RouterServer


def main() -> None:
    parser = argparse.ArgumentParser(prog="router", description=__doc__)
    parser.add_argument("--config", type=Path, help="a YAML file; without one, all defaults apply")
    parser.add_argument("--controller", default="", help="host:port of a controller to follow")
    arguments = parser.parse_args()
    try:
        config = configs.load(arguments.config)
        set_up_logging(config.log_level)
        uvloop.run(_run(config, arguments.controller))
    except BatonError as error:
        sys.exit(f"router: {error.message}")


async def _run(config: Config, controller: str) -> None:
    stopping = stop_on_signals()
    server = RouterServer(config)
    await start_unless_stopped(server.start(controller), stopping)
    settle_memory()
    http = f"HTTP on {server.http_address}, " if server.http_address else ""
    print(
        f"router ready: gRPC on {server.address}, {http}metrics on {server.metrics_address}",
        flush=True,
    )
    limit = _limit_end(stopping, config.drain_seconds)
    await asyncio.gather(server.serve_until(stopping), limit)


async def _limit_end(stopping: StopSignal, drain_seconds: float) -> None:
    await stopping.requested.wait()
    limit_end(drain_seconds)


main()
