"""The parts of the router that both edges use, and the steps that gRPC and HTTP calls share."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakSet

from baton.core.errors import InvalidRequest, Unavailable
from baton.core.process import cancel_all
from baton.core.types import Caching, Request
from baton.router.edges.auth import SIMILARITY_HEADER, Caller, KeyRing
from baton.router.edges.client_buffer import ClientBuffer
from baton.router.observe.ledger import RequestLedger
from baton.router.requests.serving import Activity
from baton.router.response_cache.cached_responses import CachedResponses
from baton.router.served_models import ServedModel, ServedModels
from baton.router.workers.controller_client import NO_CONTROLLER, ControllerClient


class ParsedCall(NamedTuple):
    """A call that generates; its requests differ in prompt and seed only."""

    caller: Caller
    model: ServedModel
    requests: Sequence[Request]
    ledger: RequestLedger


def complete_call(
    caller: Caller,
    model: ServedModel,
    requests: Sequence[Request],
    header: Callable[[str], str],
    arrived: float,
    deadline: float = math.inf,
) -> ParsedCall:
    """Applies the caller's key and the call's headers to parsed requests. `header` returns an empty
    string for an absent header."""
    first, caching = requests[0], Caching.parse(header("cache-control"))
    similarity = caller.semantic_similarity(first.semantic_similarity, header(SIMILARITY_HEADER))
    requests = [
        replace(
            each,
            cache_salt=caller.salt(each.cache_salt),
            tenant=caller.key.name,
            priority=caller.priority(each.priority),
            caching=caching,
            semantic_similarity=similarity,
            deadline=deadline,
        )
        for each in requests
    ]
    ledger = RequestLedger(
        first.request_id,
        arrived,
        sum(request.n for request in requests),
        owner=caller.key.name,
        traceparent=header("traceparent"),
        model=first.model,
    )
    return ParsedCall(caller, model, requests, ledger)


@dataclass(frozen=True, slots=True)
class EdgeContext:
    models: ServedModels
    activity: Activity
    keys: KeyRing
    reader_buffer: int
    controller: ControllerClient = NO_CONTROLLER
    responses: CachedResponses | None = None
    # One per call in progress that generates.
    buffers: WeakSet[ClientBuffer] = field(default_factory=WeakSet)

    def find(self, name: str, caller: Caller, *, encoder: bool = True) -> ServedModel:
        """Finds a model by its name, an adapter's or, with `encoder`, the embedding model's.
        Raises PermissionDenied and UnknownModel."""
        only = self.models.only
        if name or only:
            caller.check_model(name or only.name)  # type: ignore[union-attr]
        return self.models.find(name, caller.key.may_use, encoder=encoder)

    def find_generating(self, name: str, caller: Caller) -> ServedModel:
        """Like `find`, without the embedding model."""
        return self.find(name, caller, encoder=False)

    def model_names(self, caller: Caller) -> list[str]:
        """Names of all models that the caller may use."""
        return [name for name in self.models.names() if caller.key.may_use(name)]

    @property
    def can_place(self) -> bool:
        """True if requests to at least one model can be placed."""
        return any(model.serving.placer.can_place for model in self.models)

    @contextlib.contextmanager
    def admit(self, call: ParsedCall) -> Iterator[None]:
        """Counts the call's answers toward the key's limits and keeps its ledger while the call is
        answered. Raises if a limit is exceeded."""
        answers, limit = len(call.ledger.answers), self.activity.limit
        if answers > limit:
            raise InvalidRequest(f"this router allows {limit} concurrent answers", field="n")
        with call.caller.admit(answers), self.activity.ledgers.keep(call.ledger):
            yield

    @contextlib.asynccontextmanager
    async def answers(self, call: ParsedCall) -> AsyncIterator[ClientBuffer]:
        """Generates the call's answers at their own pace. Leaving the context cancels them."""
        buffer = ClientBuffer(self.reader_buffer)
        self.buffers.add(buffer)
        generating = call.model.serving.generate_all(call.requests, call.ledger, buffer.put)
        filling = asyncio.create_task(buffer.close_after(generating))
        try:
            yield buffer
        finally:
            await cancel_all(filling)

    def end_calls(self) -> None:
        """Ends every call in progress that generates with an error."""
        for buffer in self.buffers:
            buffer.close(Unavailable("this router is stopping"))
