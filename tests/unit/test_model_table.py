"""When a removed model's workers may end, and what of the table is saved."""

from __future__ import annotations

import pytest

from baton.cluster import ray_session
from baton.cluster.model_table import QUIET_SECONDS, ModelTable
from baton.core import config as configs
from baton.core.errors import InvalidRequest
from baton.v1 import cluster_pb2 as pb

CONFIG = configs.parse({"models": {"one": {"model": "/one"}, "two": {"model": "/two"}}})


class Store:
    """Ray's, as far as models go."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, bool]] = []

    def save(self, rows: list[tuple[str, str, bool]]) -> None:
        self.rows = rows


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(ray_session, "load_models", lambda: made.rows)
    monkeypatch.setattr(ray_session, "save_models", made.save)
    return made


async def test_workers_of_a_removed_model_stay_while_a_router_has_requests(store: Store) -> None:
    now = 100.0
    table = ModelTable(CONFIG, lambda: now)
    await table.remove("two")
    assert (table.served, table.leaving) == (["one"], ["two"])
    now += QUIET_SECONDS / 2
    assert not table.is_idle("two"), "a router may not have heard of it"
    table.report(pb.RouterReport(router_id="a", model="two", active_requests=3))
    table.report(pb.RouterReport(router_id="b", model="two"))
    now += QUIET_SECONDS - 1
    assert not table.is_idle("two")
    now += 1
    assert table.is_idle("two")


async def test_a_restarted_controller_finds_the_models_as_they_were(store: Store) -> None:
    table = ModelTable(CONFIG)
    await table.add(pb.NamedModel(name="three", keys='{"model": "/three", "page_size": 8}'))
    await table.remove("one")
    again = ModelTable(CONFIG)
    assert (again.served, again.leaving) == (["two", "three"], ["one"])
    assert (again.config("three").model, again.config("three").page_size) == ("/three", 8)
    assert [each.name for each in again.named] == ["two", "three"]
    await again.forget("one")
    assert ModelTable(CONFIG).leaving == []


async def test_names_are_checked(store: Store) -> None:
    table = ModelTable(CONFIG)
    with pytest.raises(InvalidRequest, match="name one: 'one', 'two'"):
        table.check("")
    with pytest.raises(InvalidRequest, match="a model 'one' is served"):
        await table.add(pb.NamedModel(name="one", keys='{"model": "/x"}'))
    await table.remove("one")
    with pytest.raises(InvalidRequest, match="is still being removed"):
        await table.add(pb.NamedModel(name="one", keys='{"model": "/x"}'))
    with pytest.raises(InvalidRequest, match="'two' is the only model"):
        await table.remove("two")
    assert table.check("") == "two"
