"""What calls need of the router, over gRPC and HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from weakref import WeakSet

from baton.core.errors import Unavailable
from baton.core.generation_defaults import NO_DEFAULTS, GenerationDefaults
from baton.core.types import Adapter, Pooling, Request
from baton.router.edges.auth import Caller, KeyRing
from baton.router.edges.client_buffer import ClientBuffer
from baton.router.requests.serving import Serving
from baton.router.workers.controller_client import NO_CONTROLLER, ControllerClient
from baton.router.workers.membership import Membership


@dataclass(frozen=True, slots=True)
class EdgeContext:
    serving: Serving
    membership: Membership
    keys: KeyRing
    model: str
    reader_buffer: int
    defaults: GenerationDefaults = NO_DEFAULTS
    controller: ControllerClient = NO_CONTROLLER
    # Of the HTTP calls in progress.
    buffers: WeakSet[ClientBuffer] = field(default_factory=WeakSet)

    def find_adapter(self, model: str, caller: Caller) -> Adapter | None:
        """What a model's name stands for; None for the model itself. Raises PermissionDenied and
        UnknownModel."""
        caller.check_model(model or self.model)
        return self.serving.adapters.find(model, caller.key.may_use)

    def addressed(self, request: Request, model: str, caller: Caller) -> Request:
        """The request to the model that the caller names. Raises as `check_model` does."""
        caller.check_model(model or self.model)
        embedding = self.serving.embedding_model
        if embedding and model == embedding.name:
            return embedding.addressed(request)
        pooling = Pooling.LAST if request.pooling is Pooling.ENCODER else request.pooling
        adapter = self.find_adapter(model, caller)
        return replace(request, model=model or self.model, adapter=adapter, pooling=pooling)

    def check_model(self, name: str, caller: Caller) -> None:
        """Raises PermissionDenied and UnknownModel."""
        if name not in self.model_names(caller):
            self.find_adapter(name, caller)

    def model_names(self, caller: Caller) -> list[str]:
        """Those that the caller may use."""
        embedding = self.serving.embedding_model
        names = [
            self.model,
            *self.serving.adapters.served,
            *([embedding.name] if embedding else ()),
        ]
        return [name for name in names if caller.key.may_use(name)]

    def end_calls(self) -> None:
        """Ends every HTTP call in progress with an error."""
        for buffer in self.buffers:
            buffer.close(Unavailable("this router stops"))
