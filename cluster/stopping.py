"""Ends every actor of a cluster, in order: of the Ray namespace that this process is in.

Workers come and go with the pools, so who is there is asked of Ray.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import ray

from baton.cluster import store
from baton.cluster.joining import PREFIX, clusters, join
from baton.cluster.member import CONTROLLER, is_router, is_worker
from baton.cluster.worker_actors import find, kill
from baton.core.errors import InvalidRequest, Unavailable

POLL_SECONDS = 0.1
# For a process to say that it is there.
ANSWER_SECONDS = 5.0


def stop_everything(seconds: float, hurry: threading.Event) -> None:
    """Gives routers, and then workers, so many seconds to let requests come to their end; none
    once `hurry` is set. Leaves Ray."""
    try:
        _stop_all(seconds, hurry)
    except ray.exceptions.RayError as error:
        raise Unavailable(f"Ray cannot be reached, and processes may be left: {error}") from error
    finally:
        ray.shutdown()


def stop_detached(address: str, name: str, seconds: float, hurry: threading.Event) -> str:
    """Stops a cluster on the Ray at `address`, the only one where `name` is empty; its name."""
    join(address, PREFIX)
    found = clusters()
    ray.shutdown()
    try:
        name = meant(name, found)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error.message} (on the Ray at {address})") from None
    join(address, name)
    stop_everything(seconds, hurry)
    return name


def meant(name: str, found: list[str]) -> str:
    """Which of the clusters that were found is called so, as `--name` had it or as Ray has it."""
    if not found:
        raise InvalidRequest("no cluster is there")
    if not name and len(found) > 1:
        raise InvalidRequest(f"say which of {', '.join(found)}")
    for each in found:
        if not name or name in (each, each.removeprefix(PREFIX)):
            return each
    raise InvalidRequest(f"no cluster is called {name}; there is {', '.join(found)}")


def _stop_all(seconds: float, hurry: threading.Event) -> None:
    # It would start again what ends.
    kill(CONTROLLER)
    names = ray.util.list_named_actors()
    # Routers first: their requests need the workers.
    _stop([name for name in names if is_router(name)], seconds, hurry)
    _stop([name for name in names if is_worker(name)], seconds, hurry)
    # With those that have no process yet.
    for name in ray.util.list_named_actors():
        kill(name)
    store.forget()


def _stop(names: list[str], seconds: float, hurry: threading.Event) -> None:
    deadline = time.monotonic() + seconds
    actors = _running(names)
    stops = [actor.stop.remote() for actor in actors]
    hurried = False
    while stops and time.monotonic() < deadline:
        if hurry.is_set() and not hurried:
            hurried = True
            for actor in actors:
                actor.hurry.remote()
        _, stops = ray.wait(stops, num_returns=len(stops), timeout=POLL_SECONDS)


def _running(names: list[str]) -> list[Any]:
    """The actors that have a process: Ray may still look for a place for others."""
    actors = [actor for actor in map(find, names) if actor]
    answers = {actor.__ray_ready__.remote(): actor for actor in actors}
    if not answers:
        return []
    given, _ = ray.wait(list(answers), num_returns=len(answers), timeout=ANSWER_SECONDS)
    return [answers[answer] for answer in given]
