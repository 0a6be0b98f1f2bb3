"""What calls need of the router, over gRPC and HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakSet

from baton.core.errors import Unavailable
from baton.router.edges.auth import Caller, KeyRing
from baton.router.edges.client_buffer import ClientBuffer
from baton.router.requests.serving import Activity
from baton.router.response_cache.cached_responses import CachedResponses
from baton.router.served_models import ServedModel, ServedModels
from baton.router.workers.controller_client import NO_CONTROLLER, ControllerClient


@dataclass(frozen=True, slots=True)
class EdgeContext:
    models: ServedModels
    activity: Activity
    keys: KeyRing
    reader_buffer: int
    controller: ControllerClient = NO_CONTROLLER
    responses: CachedResponses | None = None
    # Of the HTTP calls in progress.
    buffers: WeakSet[ClientBuffer] = field(default_factory=WeakSet)

    def find(self, name: str, caller: Caller, *, encoder: bool = True) -> ServedModel:
        """The model that a caller's name of a model, an adapter or the embedding model (`encoder`)
        leads to. Raises PermissionDenied and UnknownModel."""
        only = self.models.only
        if name or only:
            caller.check_model(name or only.name)  # type: ignore[union-attr]
        return self.models.find(name, caller.key.may_use, encoder=encoder)

    def find_generating(self, name: str, caller: Caller) -> ServedModel:
        """The same without the embedding model."""
        return self.find(name, caller, encoder=False)

    def model_names(self, caller: Caller) -> list[str]:
        """Those that the caller may use."""
        return [name for name in self.models.names() if caller.key.may_use(name)]

    @property
    def can_place(self) -> bool:
        """Whether requests to some model can be placed."""
        return any(model.serving.placer.can_place for model in self.models)

    def end_calls(self) -> None:
        """Ends every HTTP call in progress with an error."""
        for buffer in self.buffers:
            buffer.close(Unavailable("this router stops"))
