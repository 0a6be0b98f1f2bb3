"""Pages of lists, as the OpenAI API asks for them: limit, order, and the id to begin after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from baton.core.errors import InvalidRequest, UnknownRequest
from baton.core.proto_json import Json
from baton.router.edges.http.request_model import shown

Listed = TypeVar("Listed", bound=Mapping[str, object])


def query_limit(given: str | None, default: int, most: int) -> int:
    if given is None:
        return default
    if not given.isdecimal() or len(given) > 9 or not 1 <= int(given) <= most:
        raise InvalidRequest(f"limit must be 1 to {most}, not {shown(given)}", field="limit")
    return int(given)


def page(query: Mapping[str, str], found: Sequence[Listed], default: int, most: int) -> Json:
    """At most `limit` items after the id `after`. `found` has the newest first."""
    match query.get("order", "desc"):
        case "asc":
            found = found[::-1]
        case order if order != "desc":
            raise InvalidRequest(f"order must be asc or desc, not {shown(order)}", field="order")
    limit = query_limit(query.get("limit"), default, most)
    if after := query.get("after"):
        places = [place for place, each in enumerate(found) if each["id"] == after]
        if not places:
            raise unknown_id(after)
        found = found[places[0] + 1 :]
    shown_items = [{**each} for each in found[:limit]]
    ids = [each["id"] for each in shown_items] or [None]
    return {
        "object": "list",
        "data": shown_items,
        "first_id": ids[0],
        "last_id": ids[-1],
        "has_more": len(found) > limit,
    }


def unknown_id(identity: str) -> UnknownRequest:
    return UnknownRequest(f"there is no {identity[:80]!r} here", field="id")
