"""What calls need of the router, over gRPC and HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakSet

from baton.core.errors import Unavailable, UnknownModel
from baton.core.generation_defaults import NO_DEFAULTS, GenerationDefaults
from baton.router.edges.auth import KeyRing
from baton.router.edges.client_buffer import ClientBuffer
from baton.router.requests.serving import Serving
from baton.router.workers.membership import Membership


@dataclass(frozen=True, slots=True)
class EdgeContext:
    serving: Serving
    membership: Membership
    keys: KeyRing
    model: str
    reader_buffer: int
    defaults: GenerationDefaults = NO_DEFAULTS
    # Of the HTTP calls in progress.
    buffers: WeakSet[ClientBuffer] = field(default_factory=WeakSet)

    def check_model(self, name: str) -> None:
        if name not in ("", self.model):
            raise UnknownModel(
                f"there is no model {name!r} here; this cluster serves {self.model!r}",
                field="model",
            )

    def end_calls(self) -> None:
        """Ends every HTTP call in progress with an error."""
        for buffer in self.buffers:
            buffer.close(Unavailable("this router stops"))
