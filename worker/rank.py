"""A process of a worker that several share: `python -m baton.worker.rank STEPS TRANSFERS COPIES`.

The numbers are inherited sockets that lead to rank 0, the worker itself (worker/ranks.py):

    settings ─▶ load ─▶ LOADED, or the error ─▶ meet the others ─▶ steps, until the socket ends
                                                               ├─▶ transfers, on a thread
                                                               └─▶ copies, on another

It lives as long as rank 0 has the first two open, however that ends. Signals are for rank 0.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core.errors import BatonError
from baton.core.process import set_up_logging
from baton.worker.cpu import stand_back, use_threads
from baton.worker.rank_settings import LOADED, RankSettings, encode_error

if TYPE_CHECKING:
    from baton.engine.engine import Engine

log = logging.getLogger(__name__)

# For the socket of steps to end like that of transfers; a step may wait for a rank 0 that is gone.
GRACE_SECONDS = 5.0


def main() -> None:
    """Ends the process with 0 when rank 0 lets go of it, with 1 when it cannot go on."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    steps, transfers = Connection(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))
    try:
        _live(steps, transfers, Connection(int(sys.argv[3])))
    except (EOFError, ConnectionError):
        os._exit(0)
    except BaseException:
        log.exception("this rank can no longer be trusted and ends")
        os._exit(1)


def _live(steps: Connection, transfers: socket.socket, copies: Connection) -> None:
    settings = RankSettings.decode(steps.recv_bytes())
    set_up_logging(settings.log_level)
    use_threads(settings.threads)
    stand_back(settings.nice)
    try:
        engine = _load(settings, lambda: steps.send_bytes(LOADED))
    except BatonError as error:
        steps.send_bytes(encode_error(error))
        steps.recv_bytes()  # rank 0 ends us when it has told its reason
        raise
    serving = (transfers, engine, settings.transport)
    threading.Thread(target=_serve_transfers, args=serving, name="transfer", daemon=True).start()
    if settings.rows_file is not None:
        copying = (copies, engine, settings.rows_file)
        threading.Thread(target=_serve_copies, args=copying, name="copies", daemon=True).start()
    while True:
        engine.follow(steps.recv_bytes())


def _load(settings: RankSettings, loaded: Callable[[], None]) -> Engine:
    # Imported here: torch must find the number of its threads.
    from baton.engine.engine import Engine
    from baton.engine.group import Group

    _use(settings.device)
    group = Group(
        settings.split,
        Path(settings.meeting_point),
        own_devices=settings.own_devices,
        loaded=loaded,
    )
    return Engine.load(
        Path(settings.folder),
        dtype=settings.dtype,
        device=settings.device,
        page_size=settings.page_size,
        kv_memory=settings.kv_memory,
        max_context=settings.max_context,
        threads=settings.threads,
        random_weights=settings.random_weights,
        gpu=settings.gpu,
        group=group,
    )


def _use(device: str) -> None:
    """Has the calling thread launch what it launches on this device."""
    import torch

    if device != "cpu":
        torch.cuda.set_device(device)


def _serve_transfers(channel: socket.socket, engine: Engine, transport: str) -> None:
    """Ends the process when rank 0 has let go of it, or when transfers cannot go on."""
    from baton.kv_transfer.choose import choose_transport
    from baton.kv_transfer.heads import HeadRange
    from baton.kv_transfer.shard_host import serve_shard
    from baton.worker.pool_shape import pool_memory

    heads = engine.kv.shape[4]
    try:
        _use(str(engine.kv.device))
        chosen = choose_transport(transport, engine.kv.device.type)
        own = HeadRange(engine.split.rank * heads, heads)
        serve_shard(channel, chosen, pool_memory(engine), own)
    except BaseException:
        log.exception("transfers of this rank can no longer be trusted")
        os._exit(1)
    time.sleep(GRACE_SECONDS)
    os._exit(0)


def _serve_copies(first: Connection, engine: Engine, file: int) -> None:
    """Ends the process when copies cannot go on. Where rank 0 is gone, others see to that."""
    from baton.engine.rank_memory import follow_copies

    try:
        _use(str(engine.kv.device))
        follow_copies(engine.kv, engine.split, file, first)
    except (EOFError, ConnectionError):
        return
    except BaseException:
        log.exception("copies of this rank's pages can no longer be trusted")
        os._exit(1)


if __name__ == "__main__":
    main()
