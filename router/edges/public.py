"""What callers may be told of what went wrong inside: neither where processes are nor where files
are. The log has the whole of it."""

from __future__ import annotations

import re

from baton.core.errors import BatonError, translation

_PRIVATE = re.compile(
    r"""
    (?:ipv[46]|unix|dns):[\w.:/%\[\]-]+                # as gRPC writes addresses
    | \b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b              # 10.0.0.7:50051
    | \[[0-9a-fA-F:]{2,}(?:%\w+)?\](?::\d+)?            # [::1]:50051
    | \b[\w-]+(?:\.[\w-]+)+:\d{2,5}\b                   # gpu-7.local:50051
    | \blocalhost:\d+\b
    | (?<![\w.:/])~?/(?:[\w.+@-]+/)+[\w.+@-]*           # /models/tiny/config.json
    | \b0x[0-9a-fA-F]{4,}\b                             # <function at 0x7f12…>
    """,
    re.VERBOSE,
)


def scrubbed(text: str) -> str:
    return _PRIVATE.sub("…", text)


def told(error: BatonError) -> BatonError:
    """The error as a caller may see it. What the caller did wrong is told in full: it holds only
    what the caller sent."""
    if translation(error).http < 500:
        return error
    return type(error)(scrubbed(error.message), field=error.field, retry_after=error.retry_after)
