"""What operators look at: the cluster, what holds it back, the last minutes, and where the time
of the latest requests went."""

from __future__ import annotations

from google.protobuf.message import Message
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from baton.core.proto_json import to_json
from baton.router.edges.auth import KeyRing
from baton.router.edges.http.answers import encode
from baton.router.edges.http.fields import Integer, Json
from baton.router.observe.ledger import KEPT_REQUESTS
from baton.router.observe.overview import RECENT_REQUESTS, Overview

LIMIT = Integer("limit", "How many requests at most.", 1, KEPT_REQUESTS, RECENT_REQUESTS)
_LONGEST_LIMIT = 10  # digits


class OverviewApi:
    def __init__(self, overview: Overview, keys: KeyRing) -> None:
        self._overview = overview
        self._keys = keys

    async def cluster(self, http: HttpRequest) -> Response:
        return _message(self._overview.public_status())

    async def diagnosis(self, http: HttpRequest) -> Response:
        return _message(self._overview.diagnosis())

    async def trends(self, http: HttpRequest) -> Response:
        return _message(self._overview.trends())

    async def recent(self, http: HttpRequest) -> Response:
        found = self._overview.recent(_limit(http.query_params.get("limit")))
        return _json({"object": "list", "data": [to_json(timing) for timing in found]})

    async def timing(self, http: HttpRequest) -> Response:
        caller = self._keys.caller(http.headers.get("authorization", ""))
        return _message(self._overview.timing(http.path_params["request_id"], caller))


def _limit(given: str | None) -> int:
    whole = given is not None and given.isdecimal() and len(given) < _LONGEST_LIMIT
    return LIMIT.of({"limit": int(given or 0) if whole else given}) or 0


def _message(message: Message) -> Response:
    return _json(to_json(message))


def _json(content: Json) -> Response:
    return Response(encode(content), media_type="application/json")
