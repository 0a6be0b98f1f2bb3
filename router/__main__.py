"""Starts a router without Ray: `python -m router --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import uvloop

from core import config as configs
from core.config import Config
from core.errors import BatonError
from router.server import RouterServer


def main() -> None:
    parser = argparse.ArgumentParser(prog="router", description=__doc__)
    parser.add_argument("--config", type=Path, help="a YAML file; the defaults when not given")
    parser.add_argument("--controller", default="", help="host:port of a controller to follow")
    arguments = parser.parse_args()
    try:
        config = configs.load(arguments.config)
        logging.basicConfig(
            level=config.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s"
        )
        uvloop.run(_run(config, arguments.controller))
    except BatonError as error:
        sys.exit(f"router: {error.message}")


async def _run(config: Config, controller: str) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    server = RouterServer(config)
    await server.start(controller)
    print(
        f"router ready: gRPC on {server.address}, metrics on {server.metrics_address}", flush=True
    )
    await server.serve_until(stopped)


main()
