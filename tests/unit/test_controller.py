"""What a controller finds in the store of Ray, and does about it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import ray
from waiting import until

from baton.cluster import controller as controllers
from baton.cluster import ray_session
from baton.cluster.actors import WorkerActors
from baton.cluster.controller import Controller
from baton.cluster.fleet import DRAINED, Fleet, Member
from baton.core.errors import Unavailable
from baton.core.process import cancel_all
from baton.core.types import Role
from baton.planner.sizing import Pools
from baton.v1 import cluster_pb2 as pb

TREE: dict[str, object] = {"models": {"one": {"model": "/one"}}}
ROWS = [("one", '{"model": "/one"}', False), ("two", '{"model": "/two"}', False)]


class Store:
    """Ray's: what is saved, and the actors there are."""

    def __init__(self) -> None:
        self.models: list[tuple[str, str, bool]] = []
        self.fleet = Fleet({}).scaled(Pools(1, 1), model="one")
        self.made: list[tuple[str, str]] = []  # model and worker
        self.lost = False

    def save_fleet(self, fleet: Fleet) -> None:
        if self.lost:
            raise Unavailable("no head")
        self.fleet = fleet

    def kill(self, name: str) -> None:
        self.made = [each for each in self.made if each[1] != name]

    def save_models(self, rows: list[tuple[str, str, bool]]) -> None:
        self.models = rows


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()

    def make(actors: WorkerActors, name: str, role: Role) -> None:
        made.made.append((actors._config.model, name))

    changes: dict[str, Callable[..., object]] = {
        "load_models": lambda: made.models,
        "save_models": made.save_models,
        "load_fleet": lambda: made.fleet,
        "save_fleet": made.save_fleet,
        "load_adapters": dict,
        "kill_actor": made.kill,
    }
    for name, change in changes.items():
        monkeypatch.setattr(ray_session, name, change)
    monkeypatch.setattr(WorkerActors, "make", make)
    monkeypatch.setattr(WorkerActors, "waits_for", lambda *_: "starting")
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: [name for _, name in made.made])
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(controllers, "_end_process", lambda task: None)
    return made


@asynccontextmanager
async def running() -> AsyncIterator[Controller]:
    controller = Controller("127.0.0.1:0", TREE, 0.0, joined=False, tether="")
    try:
        yield controller
    finally:
        await cancel_all(controller._learning, controller._reconciling)
        await controller._server.stop(None)


async def test_a_model_that_was_saved_without_workers_gets_them(store: Store) -> None:
    """The controller before this one has ended in between."""
    store.models = ROWS

    async def are_made() -> bool:
        return {name for model, name in store.made if model == "/two"} == {"prefill-1", "decode-1"}

    async with running():
        await until(are_made)
        assert (store.fleet.wanted_of("one"), store.fleet.wanted_of("two")) == (
            Pools(1, 1),
            Pools(1, 1),
        )


async def test_a_model_whose_workers_could_not_be_saved_gets_them_later(store: Store) -> None:
    async def are_wanted() -> bool:
        return store.fleet.wanted_of("two") == Pools(2, 1)

    async with running() as controller:
        store.lost = True
        named = pb.NamedModel(name="two", keys='{"model": "/two", "prefill": {"workers": 2}}')
        with pytest.raises(Unavailable):
            await controller.add_model(named)
        assert not await are_wanted()
        store.lost = False
        controller._manager.changed.set()
        await until(are_wanted)


async def test_workers_that_an_operator_has_drained_stay_away(store: Store) -> None:
    """Only a restarted controller takes a model without workers for one that never had any."""

    async def are_made() -> bool:
        return len(store.made) == 2

    async def are_gone() -> bool:
        return not store.made

    async with running() as controller:
        await until(are_made)
        for name in ("prefill-0", "decode-0"):
            await controller._manager.forget(name)
        await until(are_gone)
        await controller._reconcile()
        assert store.fleet.wanted.total == 0


async def test_a_worker_that_has_drained_is_told_of_whoever_forgets_it(store: Store) -> None:
    """Its last report may come after a round has looked at the reports, and before it retires."""

    async def are_made() -> bool:
        return len(store.made) == 2

    async with running() as controller:
        await until(are_made)
        drained = Member("decode-0", Role.DECODE, host="", progress=DRAINED)
        controller._manager.members.report(drained)
        await controller._manager.forget("decode-0")
        assert drained in await controller.members()
