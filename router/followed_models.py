"""Follows the controller's list of models: loads, serves and closes them.

    named ─loaded─▶ served ─no longer named─▶ leaving: its requests continue ─idle─▶ closed

A model whose keys have changed leaves and is loaded again. A model that is added through this
router is loaded first; then the controller is asked to name it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable

from baton.core import config as configs
from baton.core.adapter_store import resolve_locations
from baton.core.config import Config
from baton.core.errors import BatonError, InvalidConfig, InvalidRequest
from baton.core.process import cancel_all
from baton.router.served_models import ServedModel, ServedModels, SharedParts
from baton.router.workers.controller_client import ControllerClient, apply_members
from baton.v1 import cluster_pb2 as pb

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


class FollowedModels:
    def __init__(
        self,
        config: Config,
        models: ServedModels,
        shared: SharedParts,
        controller: ControllerClient,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when a model is added or removed, or its workers change."""
        self._config = config
        self._models = models
        self._shared = shared
        self._controller = controller
        self._on_change = on_change
        self._members = pb.Members()
        self._leaving: list[ServedModel] = []
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._adding: set[str] = set()
        self._added: dict[str, ServedModel] = {}  # loaded here, not yet named by the controller
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def all(self) -> list[ServedModel]:
        """The served and the leaving models."""
        return [*self._models, *self._leaving]

    async def load(self, config: Config, keys: str = "") -> ServedModel:
        model = await ServedModel.load(config, self._shared, keys)
        model.membership.listen(self._on_change)
        return model

    async def begin(self, models: Iterable[pb.NamedModel]) -> None:
        """Serves the models that can be loaded now, and retries the others."""
        for named in models:
            if not await self._try_load(named):
                self._loading[named.name] = asyncio.create_task(self._load_until_served(named))

    async def ask_to_add(self, named: pb.NamedModel) -> None:
        """Loads a model, then asks the controller to name it, with resolved locations so that all
        processes load the same. Raises InvalidRequest if it cannot be served."""
        self._models.check_free(named.name)
        if named.name in self._adding:
            raise InvalidRequest(f"a model {named.name!r} is being added", field="name")
        self._adding.add(named.name)
        try:
            await self._ask_to_add(named)
        except InvalidConfig as error:  # here the caller's mistake, not the operator's
            raise InvalidRequest(error.message, field=error.field) from error
        finally:
            self._adding.discard(named.name)

    async def _ask_to_add(self, named: pb.NamedModel) -> None:
        keys = parse_keys(named.keys)
        config = configs.model_config(self._config, named.name, keys)
        locations = await asyncio.to_thread(resolve_locations, config)
        resolved = pb.NamedModel(name=named.name, keys=json.dumps({**keys, **locations}))
        await self._discard_added(named.name)
        model = self._added[named.name] = await self._load_named(resolved)
        try:
            for name in model.names:
                self._models.check_free(name)
            await self._controller.add_model(resolved)
        except BaseException:
            await self._discard_added(named.name)
            raise

    async def _discard_added(self, name: str) -> None:
        """Closes a model that was loaded here and that the controller does not name."""
        if model := self._added.pop(name, None):
            await model.close()
            self._shared.metrics.forget(name)

    async def ask_to_remove(self, name: str) -> None:
        self._models.named(name)
        await self._controller.remove_model(pb.RemoveModelRequest(name=name))

    async def _load_named(self, named: pb.NamedModel) -> ServedModel:
        added = self._added.get(named.name)
        if added and added.keys == named.keys:
            return self._added.pop(named.name)
        config = configs.model_config(self._config, named.name, parse_keys(named.keys))
        return await self.load(config, named.keys)

    def apply(self, members: pb.Members) -> None:
        """Follows a change of the controller's membership."""
        self._members = members
        wanted = {named.name: named for named in members.models}
        for model in self._models if wanted else ():
            if model.name not in wanted or model.keys != wanted[model.name].keys:
                self.remove(model.name)
        served = {model.name for model in self._models}
        for name in wanted.keys() - served - self._loading.keys():
            self._loading[name] = asyncio.create_task(self._load_until_served(wanted[name]))
        for name in self._loading.keys() - wanted.keys():
            self._loading.pop(name).cancel()
        for model in self.all:
            apply_members(members, model)

    def add(self, model: ServedModel) -> None:
        """Serves a model from now on, on its known workers."""
        self._models.add(model)
        apply_members(self._members, model)
        self._on_change()

    def remove(self, name: str) -> None:
        """Stops serving a name. Its running requests continue."""
        if model := self._models.remove(name):
            self._leaving.append(model)
            task = asyncio.create_task(self._close_when_idle(model))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            self._on_change()

    async def close(self) -> None:
        await cancel_all(*self._loading.values(), *self._tasks)
        for model in (*self.all, *self._added.values()):
            await model.close()

    async def _load_until_served(self, named: pb.NamedModel) -> None:
        """Loads a model, with retries: its folder may not exist yet."""
        while True:
            if await self._try_load(named):
                del self._loading[named.name]
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _try_load(self, named: pb.NamedModel) -> bool:
        try:
            model = await self._load_named(named)
        except Exception:  # no error may affect the other models
            log.exception("cannot load the model %s", named.name)
            return False
        try:
            self.add(model)
        except BatonError as error:
            log.error("cannot serve the model %s: %s", named.name, error.message)
            await model.close()
            return False
        return True

    async def _close_when_idle(self, model: ServedModel) -> None:
        await model.serving.idle.wait()
        self._leaving.remove(model)
        await model.close()
        if all(other.name != model.name for other in self.all):
            self._shared.metrics.forget(model.name)


def parse_keys(keys: str) -> dict[str, object]:
    """Parses a model's configuration keys, which messages carry as JSON."""
    try:
        tree = json.loads(keys)
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise InvalidRequest("the keys of a model are a JSON object", field="keys")
    return tree
