"""The process of one rank, 1 or higher, of a worker whose model is split: `python -m
baton.worker.rank_process STEPS TRANSFERS COPIES`.

The arguments are inherited sockets to rank 0, the worker itself (worker/ranks.py):

    settings ─▶ load ─▶ None, or the error ─▶ connect ─▶ steps, until the socket ends
                                                      ├─▶ transfers, on a thread
                                                      └─▶ copies, on another

It ends when rank 0 closes one of the first two sockets, and leaves signals to rank 0. This
module does not import torch at the top: the number of threads must be set first, and the
cluster checks a configuration without torch.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core.errors import BatonError, InvalidConfig
from baton.core.process import set_up_logging
from baton.engine.architecture import Split
from baton.engine.model_choice import AnyArchitecture, check_ranks_of
from baton.worker.resources import lower_priority, use_threads

if TYPE_CHECKING:
    from baton.engine.engine import Engine

log = logging.getLogger(__name__)

# For the steps' socket to end after the transfers' one; a step may be waiting for a dead rank 0.
GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RankSettings:
    """A rank's settings, pickled and sent by rank 0."""

    rank: int
    size: int
    device: str
    # Whether each rank has a GPU of its own.
    own_devices: bool
    threads: int
    nice: int
    transport: str
    log_level: str
    # `Engine.load` with all arguments except device, group and progress.
    load: Callable[..., Engine]
    # A file that does not exist yet, in a folder that all ranks can write to.
    rendezvous: str = ""
    # The inherited memory file of the second tier's rows; None without a second tier.
    rows_file: int | None = None

    @property
    def split(self) -> Split:
        return Split(self.rank, self.size)


def rank_devices(size: int, device: str, visible: int, *, may_share: bool) -> list[str]:
    """The device of each rank: one of the `visible` GPUs each, in order.

    Raises InvalidConfig if there are too few and they may not be shared.
    """
    if device == "cpu":
        return ["cpu"] * size
    if visible < size and not (visible and may_share):
        raise InvalidConfig(
            f"tensor_parallel {size} needs a GPU per rank, and this worker sees {visible}",
            field="tensor_parallel",
        )
    return [f"cuda:{rank % visible}" for rank in range(size)]


def check_ranks(size: int, model: AnyArchitecture, gpu_share: float = 1.0) -> None:
    """Raises InvalidConfig if the model cannot be split over `size` processes."""
    if size == 1:
        return
    check_ranks_of(model, size)
    if gpu_share < 1:
        raise InvalidConfig(
            "a split model takes its GPUs whole: gpu_share or tensor_parallel must be 1",
            field="tensor_parallel",
        )


def main() -> None:
    """Exits with 0 when rank 0 closes the sockets, with 1 after an error."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        _run(*(Connection(int(handle)) for handle in sys.argv[1:4]))
    except (EOFError, ConnectionError):
        os._exit(0)
    except BaseException:
        log.exception("this rank has failed")
        os._exit(1)


def _run(steps: Connection, transfers: Connection, copies: Connection) -> None:
    settings: RankSettings = steps.recv()
    set_up_logging(settings.log_level)
    use_threads(settings.threads)
    lower_priority(settings.nice)
    try:
        engine = _load(settings, lambda: steps.send(None))
    except BatonError as error:
        steps.send(error)
        steps.recv_bytes()  # rank 0 closes the socket once it has reported the error
        raise
    serving = (transfers, engine, settings.transport)
    threading.Thread(target=_serve_transfers, args=serving, name="transfer", daemon=True).start()
    if settings.rows_file is not None:
        copying = (copies, engine, settings.rows_file)
        threading.Thread(target=_serve_copies, args=copying, name="copies", daemon=True).start()
    while True:
        engine.follow(steps.recv_bytes())


def _load(settings: RankSettings, loaded: Callable[[], None]) -> Engine:
    from baton.engine.tensor_parallel import Group, NcclGroup

    _use(settings.device)
    make = NcclGroup if settings.own_devices else Group
    group = make(settings.split, Path(settings.rendezvous), loaded=loaded)
    return settings.load(device=settings.device, group=group)


def _use(device: str) -> None:
    """Sets the calling thread's device."""
    import torch

    if device != "cpu":
        torch.cuda.set_device(device)


def _serve_transfers(transfers: Connection, engine: Engine, transport: str) -> None:
    """Ends the process when rank 0 closes the socket, or when a transfer raises."""
    from baton.kv_transfer.routed_transport import choose_transport
    from baton.kv_transfer.shard_process import serve_shard
    from baton.worker.backend import head_range, pool_memory

    try:
        _use(str(engine.kv.device))
        chosen = choose_transport(transport, engine.kv.device.type)
        serve_shard(transfers, chosen, pool_memory(engine), head_range(engine))
    except BaseException:
        log.exception("the transfers of this rank have failed")
        os._exit(1)
    time.sleep(GRACE_SECONDS)
    os._exit(0)


def _serve_copies(first: Connection, engine: Engine, file: int) -> None:
    """Ends the process when a copy raises. The loss of rank 0 is left to the other sockets."""
    from baton.engine.page_memory import follow_copies

    try:
        _use(str(engine.kv.device))
        follow_copies(engine.kv, engine.split, file, first)
    except (EOFError, ConnectionError):
        return
    except BaseException:
        log.exception("the page copies of this rank have failed")
        os._exit(1)


if __name__ == "__main__":
    main()
