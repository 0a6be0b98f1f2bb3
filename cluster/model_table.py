"""The models of a cluster, saved before anything acts on a change.

    named ─removed─▶ leaving ─no router has requests to it, its workers have ended─▶ forgotten

A model is stored as its name and its configuration keys, as JSON; the only model of a cluster may
have none. Routers and the controller derive the same configuration from them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.cluster import ray_session
from baton.core import config as configs
from baton.core import model_store
from baton.core.config import Config
from baton.core.errors import InvalidRequest, describe_unknown
from baton.v1 import cluster_pb2 as pb

QUIET_SECONDS = 3.0
"""A removed model without requests for this long is idle: routers report once a second."""


@dataclass(slots=True)
class _Model:
    config: Config
    keys: str
    removed_at: float | None = None
    # When each router last reported requests to it.
    busy_at: dict[str, float] = field(default_factory=dict)


class ModelTable:
    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._changing = asyncio.Lock()
        stored = ray_session.load_models()
        for name, keys, removed in stored or _first_models(config):
            self._models[name] = self._make(name, keys)
            self._models[name].removed_at = clock() if removed else None

    def _make(self, name: str, keys: str) -> _Model:
        # Only a cluster's single model has no keys.
        tree = json.loads(keys) if keys else None
        config = self._config if tree is None else configs.model_config(self._config, name, tree)
        return _Model(config, keys)

    @property
    def named(self) -> list[pb.NamedModel]:
        return [pb.NamedModel(name=name, keys=self._models[name].keys) for name in self.served]

    @property
    def served(self) -> list[str]:
        return [name for name, model in self._models.items() if model.removed_at is None]

    @property
    def leaving(self) -> list[str]:
        return [name for name, model in self._models.items() if model.removed_at is not None]

    def config(self, name: str) -> Config:
        return self._models[name].config

    def check(self, name: str) -> str:
        """Returns the name if it is a served model's; an empty name selects the only model."""
        if name in self.served:
            return name
        if name or len(self.served) != 1:
            raise InvalidRequest(describe_unknown(name, self.served), field="model")
        return self.served[0]

    async def add(self, named: pb.NamedModel) -> Config:
        made = self._make(named.name, named.keys)
        async with self._changing:
            if named.name in self._models:
                how = "is served" if named.name in self.served else "is still being removed"
                raise InvalidRequest(f"a model {named.name!r} {how}", field="name")
            await self._save({**self._models, named.name: made})
        return made.config

    async def remove(self, name: str) -> None:
        async with self._changing:
            self.check(name)
            if len(self.served) == 1:
                raise InvalidRequest(
                    f"{name!r} is the only model; add another one first, or stop the cluster",
                    field="name",
                )
            removed = replace(self._models[name], removed_at=self._clock())
            await self._save({**self._models, name: removed})

    async def forget(self, name: str) -> None:
        """Drops a removed model whose last worker has ended."""
        async with self._changing:
            await self._save({key: each for key, each in self._models.items() if key != name})

    def report(self, report: pb.RouterReport) -> None:
        """Notes when a router last had requests to the model."""
        if report.active_requests and report.model in self._models:
            self._models[report.model].busy_at[report.router_id] = self._clock()

    def is_idle(self, name: str) -> bool:
        """True once no router has had requests to a removed model for QUIET_SECONDS."""
        model, now = self._models[name], self._clock()
        assert model.removed_at is not None
        busy_at = max(model.busy_at.values(), default=0.0)
        return now >= model.removed_at + QUIET_SECONDS and now >= busy_at + QUIET_SECONDS

    async def _save(self, models: dict[str, _Model]) -> None:
        rows = [(name, each.keys, each.removed_at is not None) for name, each in models.items()]
        await asyncio.to_thread(ray_session.save_models, rows)
        self._models = models


def _first_models(config: Config) -> list[tuple[str, str, bool]]:
    return [
        (model_store.model_name(each), configs.own_keys(config, each), False)
        for each in configs.served_configs(config)
    ]
