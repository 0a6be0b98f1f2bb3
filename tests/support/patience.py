"""A busy machine is no failed look-up."""

from __future__ import annotations

import pytest
from waiting import until

from baton.router.response_cache import redis_store
from baton.router.server import RouterServer


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Gives every reply of a Redis minutes."""
    for limit in ("LOOKUP_SECONDS", "STORE_SECONDS"):
        patch.setattr(redis_store, limit, 60.0)
    patch.setattr(redis_store, "RETRY_SECONDS", 0.05)


async def connected(server: RouterServer) -> None:
    """Returns when the router's semantic cache has its Redis."""

    async def holds() -> bool:
        responses = server._responses
        return bool(responses and responses.semantic and responses.semantic.store.replies)

    await until(holds)
