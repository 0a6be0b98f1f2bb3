"""/v1/responses, and stored responses, which callers can retrieve or continue."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from baton.core.errors import InvalidRequest, NotServed, UnknownRequest
from baton.core.proto_json import Json
from baton.core.types import Request
from baton.router.edges.auth import Caller
from baton.router.edges.edge_context import EdgeContext
from baton.router.edges.http.body import parse_body
from baton.router.edges.http.endpoint import GenerationEndpoint, json_response
from baton.router.edges.http.paging import page
from baton.router.edges.http.responses.input_items import MAX_ITEMS_LISTED, listed_item
from baton.router.edges.http.responses.responses_renderer import Items, ResponsesRenderer
from baton.router.edges.http.responses.responses_request import (
    InputItem,
    ResponsesRequest,
    text_size,
)
from baton.router.served_models import ServedModel

STORED_CHARACTERS = 64 * 2**20
"""Limit for all responses together. Each counts with the whole conversation before it."""

_OVERHEAD, _ITEM_OVERHEAD = 1024, 128
"""Characters that a response and each item of its conversation count in addition to their text."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body: bytes
    inputs: Items = field(default_factory=dict)  # the conversation that was answered
    outputs: Items = field(default_factory=dict)

    @property
    def conversation(self) -> Items:
        return {**self.inputs, **self.outputs}

    @property
    def size(self) -> int:
        items = (*self.inputs.values(), *self.outputs.values())
        return _OVERHEAD + len(self.body) + sum(_ITEM_OVERHEAD + text_size(each) for each in items)


class ResponseStore:
    """Stores responses in this router's memory, separately for each API key. Beyond the limit, the
    least recently used response is dropped."""

    def __init__(self, limit: int = STORED_CHARACTERS) -> None:
        self._limit = limit
        self._size = 0
        # By the API key's name and the response's id, in order of last use.
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        # Owned by their calls.
        self._running: WeakValueDictionary[tuple[str, str], ResponsesRenderer] = (
            WeakValueDictionary()
        )

    def run(self, owner: str, response: ResponsesRenderer) -> None:
        """Adds a running response, and stores it when it ends."""
        name = response.id
        self._running[owner, name] = response
        response.on_end = lambda *content: self.keep(owner, name, StoredResponse(*content))

    def keep(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Stores an ended response in place of the running one."""
        self._running.pop((owner, response_id), None)
        self._stored[owner, response_id] = response
        self._size += response.size
        while self._size > self._limit:
            _, oldest = self._stored.popitem(last=False)
            self._size -= oldest.size

    def conversation(self, owner: str, response_id: str) -> Items:
        """Up to and including the response; none without an id."""
        if not response_id:
            return {}
        return self._find(owner, response_id, "previous_response_id").conversation

    def inputs(self, owner: str, response_id: str) -> Items:
        return (self._running.get((owner, response_id)) or self._find(owner, response_id)).inputs

    def item(self, owner: str, item_id: str) -> InputItem:
        """The item of a stored response, whose number is part of the item's id."""
        number = item_id.partition("_")[2].rpartition("_")[0]
        key = owner, f"resp_{number}"
        stored = self._stored.get(key)
        both = (stored.outputs, stored.inputs) if stored else ()
        found = [items[item_id] for items in both if item_id in items]
        if not found:
            raise UnknownRequest(
                f"there is no item {item_id!r} in this router's memory; send the item itself",
                field="input",
            )
        self._stored.move_to_end(key)
        return found[0]

    def body(self, owner: str, response_id: str) -> bytes:
        running = self._running.get((owner, response_id))
        return running.current() if running else self._find(owner, response_id).body

    def delete(self, owner: str, response_id: str) -> None:
        self._size -= self._find(owner, response_id).size
        del self._stored[owner, response_id]

    def cancel(self, owner: str, response_id: str) -> bytes:
        running = self._running.get((owner, response_id))
        if running:
            return running.cancel()
        self._find(owner, response_id)
        raise InvalidRequest("this response has ended and cannot be cancelled", field="id")

    def _find(self, owner: str, response_id: str, field: str = "id") -> StoredResponse:
        key = owner, response_id
        try:
            self._stored.move_to_end(key)
            return self._stored[key]
        except KeyError:
            raise UnknownRequest(
                f"there is no response {response_id!r} in this router's memory", field=field
            ) from None


class ResponsesEndpoint(GenerationEndpoint[ResponsesRequest]):
    def __init__(self, context: EdgeContext) -> None:
        super().__init__(ResponsesRenderer, context)
        self._store = ResponseStore()

    def _read(self, content: Json, caller: Caller) -> ResponsesRequest:
        body = super()._read(content, caller)
        return body.resolved(lambda item_id: self._store.item(caller.key.name, item_id))

    def _parse(
        self, content: Json, request_id: str, caller: Caller
    ) -> tuple[ResponsesRequest, tuple[Request, ...], ServedModel]:
        """Adds the conversation that the response continues."""
        body, (request,), model = super()._parse(content, request_id, caller)
        prompt = body.chat_prompt(self._history(body, caller).values())
        return body, (dataclasses.replace(request, prompt=prompt),), model

    def _history(self, body: ResponsesRequest, caller: Caller) -> Items:
        return self._store.conversation(caller.key.name, body.previous_response_id)

    def _render(
        self, body: ResponsesRequest, requests: Sequence[Request], caller: Caller
    ) -> ResponsesRenderer:
        renderer = ResponsesRenderer(body, requests, self._history(body, caller))
        if body.store:
            self._store.run(caller.key.name, renderer)
        return renderer

    async def stored(self, http: HttpRequest) -> Response:
        owner, response_id = http.user.key.name, http.path_params["response_id"]
        if http.method != "DELETE":
            if http.query_params.get("stream") == "true":
                raise NotServed("stream is not served for a stored response", field="stream")
            return Response(self._store.body(owner, response_id), media_type="application/json")
        self._store.delete(owner, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def inputs(self, http: HttpRequest) -> Response:
        found = self._store.inputs(http.user.key.name, http.path_params["response_id"])
        newest = [*found][::-1]
        names, listed = page(http.query_params, newest, 20, MAX_ITEMS_LISTED)
        return json_response({**listed, "data": [listed_item(each, found[each]) for each in names]})

    async def count(self, http: HttpRequest) -> Response:
        """The tokens of a response's prompt."""
        caller, find = http.user, self._context.find_generating
        body = await parse_body(http, lambda content: self._read(content, caller), find)
        history = self._history(body, caller).values()
        serving = self._context.find(body.model, caller).serving
        tokens, _ = await serving.tokenize(body.chat_prompt(history))
        return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})

    async def cancel(self, http: HttpRequest) -> Response:
        body = self._store.cancel(http.user.key.name, http.path_params["response_id"])
        return Response(body, media_type="application/json")
