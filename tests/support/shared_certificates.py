"""One context of TLS for all of httpx's clients with its defaults.

Each would read hundreds of certificates, for 50 ms, also where it speaks plain HTTP.
"""

from __future__ import annotations

import ssl
from functools import cache
from typing import Any

from httpx._transports import default

_create = default.create_ssl_context


@cache
def _shared() -> ssl.SSLContext:
    return _create()


def _context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is True and cert is None and trust_env:
        return _shared()
    return _create(verify, cert, trust_env)


def share_certificates() -> None:
    default.create_ssl_context = _context
