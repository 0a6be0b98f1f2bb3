"""The models that a router serves, each with its own workers, wait queue, tokenizer and adapters.

    a model's name ──────┐
    an adapter's name ───┼─find─▶ ServedModel ─▶ Serving, Membership
    the encoder's name ──┘

Every edge finds models here. A removed name is unknown at once; its running requests continue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from baton.core import model_store
from baton.core.config import Config
from baton.core.errors import InvalidRequest, UnknownModel, describe_unknown
from baton.core.generation_defaults import NO_DEFAULTS, GenerationDefaults, read_defaults
from baton.core.process import cancel_all
from baton.core.types import Pooling, Request
from baton.router.observe.metrics import MetricsByModel
from baton.router.placement.placer import Placer
from baton.router.prompts.embedding_model import EmbeddingModel
from baton.router.prompts.text import Text
from baton.router.requests.adapter_names import AdapterNames
from baton.router.requests.serving import Activity, Serving
from baton.router.response_cache.cached_responses import CachedResponses
from baton.router.workers.host_holds import HostHolds
from baton.router.workers.link import WorkerLink
from baton.router.workers.membership import Membership

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What all models of a router share."""

    router_id: str
    activity: Activity
    metrics: MetricsByModel
    responses: CachedResponses | None = None
    encoder: EmbeddingModel | None = None
    holds: HostHolds = field(default_factory=HostHolds)


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    name: str
    serving: Serving
    membership: Membership
    defaults: GenerationDefaults = NO_DEFAULTS
    keys: str = ""  # its configuration keys as JSON, from the controller
    created: int = field(default_factory=lambda: int(time.time()))
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @classmethod
    async def load(cls, config: Config, shared: SharedParts, keys: str = "") -> ServedModel:
        """Loads a model, without attaching to workers."""
        name, router = model_store.model_name(config), config.router
        folder = await asyncio.to_thread(model_store.locate, config.model, weights=False)
        text = await asyncio.to_thread(Text.load, folder, router.tool_format, router.reasoning)
        defaults = read_defaults(folder, router.generation_config)
        if str(defaults):
            log.info("the defaults of %s for requests: %s", name, defaults)
        adapters = AdapterNames(name, config.allowed_adapters)
        for adapter, location in config.adapters.items():
            adapters.serve(adapter, await adapters.find(adapter, location))
        membership = Membership(shared.router_id, name, config, shared.holds)
        serving = Serving(
            text,
            membership,
            Placer(membership, router),
            router,
            shared.metrics.of(name, membership.links),
            shared.activity,
            shared.responses,
            adapters,
            shared.encoder,
        )
        model = cls(name, serving, membership, defaults, keys)
        if router.canary_seconds:
            canary = serving.dispatcher.run_canary(router.canary_seconds)
            model.tasks.append(asyncio.create_task(canary))
        return model

    @property
    def embedding_model(self) -> EmbeddingModel | None:
        return self.serving.embedding_model

    @property
    def names(self) -> list[str]:
        """The names of the model and of its adapters."""
        return [self.name, *self.serving.adapters.served]

    def addressed(self, request: Request, name: str) -> Request:
        """Returns the request, addressed to the model, adapter or embedding model of that name."""
        embedding = self.embedding_model
        if embedding and name == embedding.name:
            return embedding.addressed(request)
        pooling = Pooling.LAST if request.pooling is Pooling.ENCODER else request.pooling
        adapter = self.serving.adapters.served.get(name)
        return replace(request, model=name or self.name, adapter=adapter, pooling=pooling)

    async def close(self) -> None:
        self.serving.closed = True
        await cancel_all(*self.tasks)
        await self.membership.stop()


class ServedModels:
    def __init__(self) -> None:
        self._served: dict[str, ServedModel] = {}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._served.values()))

    @property
    def only(self) -> ServedModel | None:
        """The only model; None if there are several or none."""
        return next(iter(self)) if len(self._served) == 1 else None

    def add(self, model: ServedModel) -> None:
        """Serves a model from now on. Raises InvalidRequest if one of its names is taken."""
        for name in model.names:
            self.check_free(name)
        self._served[model.name] = model

    def check_free(self, name: str, *, but: ServedModel | None = None) -> None:
        """Raises InvalidRequest if a model, an adapter or the embedding model has the name.
        Adapters of `but` may have it."""
        for model in self:
            embedding = model.embedding_model
            if name == model.name or (embedding and name == embedding.name):
                raise InvalidRequest(f"{name!r} is a model that is served", field="name")
            if model is not but and name in model.serving.adapters.served:
                raise InvalidRequest(f"{name!r} is an adapter of {model.name!r}", field="name")

    def remove(self, name: str) -> ServedModel | None:
        return self._served.pop(name, None)

    def names(self, *, encoder: bool = True) -> list[str]:
        """Lists the names that a request may give as its model."""
        names = [name for model in self for name in model.names]
        embedding = next((each.embedding_model for each in self), None) if encoder else None
        return [*names, *([embedding.name] if embedding else ())]

    def named(self, name: str, shown: Callable[[str], bool] = lambda _: True) -> ServedModel:
        """Returns the model of that name; an empty name selects the only one. Errors list the
        names for which `shown` is true."""
        if not name and self.only:
            return self.only
        if model := self._served.get(name):
            return model
        raise self._unknown(name, list(self._served), shown)

    def find(
        self, name: str, shown: Callable[[str], bool] = lambda _: True, *, encoder: bool = True
    ) -> ServedModel:
        """Like `named`, but also finds a model by the name of an adapter or, with `encoder`, of
        the embedding model."""
        for model in self:
            embedding = model.embedding_model if encoder else None
            if name in model.serving.adapters.served or (embedding and name == embedding.name):
                return model
        if name in self._served or (not name and self.only):
            return self.named(name)
        raise self._unknown(name, self.names(encoder=encoder), shown)

    def of_adapter(self, name: str) -> ServedModel:
        """Returns the model of an adapter."""
        for model in self:
            if name in model.serving.adapters.served:
                return model
        raise UnknownModel(f"there is no adapter {name!r} here", field="lora_name")

    def worker(self, worker_id: str) -> tuple[ServedModel, WorkerLink]:
        """Returns an attached worker and its model. Raises InvalidRequest if there is none."""
        for model in self:
            if link := model.membership.find(worker_id):
                return model, link
        names = ", ".join(sorted(name for model in self for name in model.membership.names))
        raise InvalidRequest(
            f"no worker {worker_id!r} is attached; attached workers: {names or 'none'}",
            field="worker_id",
        )

    def _unknown(self, name: str, names: list[str], shown: Callable[[str], bool]) -> InvalidRequest:
        kind = UnknownModel if name else InvalidRequest
        return kind(describe_unknown(name, filter(shown, names)), field="model")
