"""Pages of lists, as the OpenAI API asks for them: limit, order, and the id to begin after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.core.errors import InvalidRequest, UnknownRequest
from baton.core.proto_json import Json
from baton.router.edges.http.request_model import shown


def query_limit(given: str | None, default: int, most: int) -> int:
    if given is None:
        return default
    if not given.isdecimal() or len(given) > 9 or not 1 <= int(given) <= most:
        raise InvalidRequest(f"limit must be 1 to {most}, not {shown(given)}", field="limit")
    return int(given)


def page(
    query: Mapping[str, str], ids: Sequence[str], default: int, most: int
) -> tuple[Sequence[str], Json]:
    """At most `limit` ids after the id `after`, and the list's other fields. `ids` has the newest
    first."""
    match query.get("order", "desc"):
        case "asc":
            ids = ids[::-1]
        case order if order != "desc":
            raise InvalidRequest(f"order must be asc or desc, not {shown(order)}", field="order")
    limit = query_limit(query.get("limit"), default, most)
    if after := query.get("after"):
        if after not in ids:
            raise unknown_id(after)
        ids = ids[ids.index(after) + 1 :]
    chosen = ids[:limit]
    return chosen, list_fields(chosen, has_more=len(ids) > limit)


def list_fields(ids: Sequence[str], *, has_more: bool = False) -> Json:
    """The fields of a list beside its data, which has these ids."""
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return {"object": "list", "first_id": first, "last_id": last, "has_more": has_more}


def unknown_id(identity: str) -> UnknownRequest:
    return UnknownRequest(f"there is no {identity[:80]!r} here", field="id")
