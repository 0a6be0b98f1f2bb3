"""Starts a router without Ray: `python -m baton.router --config FILE`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop

from baton.core import config as configs
from baton.core.config import Config
from baton.core.errors import BatonError
from baton.core.process import set_up_logging, settle_memory, stop_on_signals
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
    await server.start(controller)
    settle_memory()
    http = f"HTTP on {server.http_address}, " if server.http_address else ""
    print(
        f"router ready: gRPC on {server.address}, {http}metrics on {server.metrics_address}",
        flush=True,
    )
    await server.serve_until(stopping)


main()
