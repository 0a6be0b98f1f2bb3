"""The names of the LoRA adapters that are served, and the requests that run under each.

A name is resolved to a digest once, when it is added: workers see only digests. A removed name is
unknown at once; its running requests keep the adapter that they began with.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from baton.core.adapter_store import check_location, find_adapter
from baton.core.config_values import NAME_RULE, is_name
from baton.core.errors import InvalidRequest
from baton.core.types import Adapter, Request


class AdapterNames:
    def __init__(self, model: str = "", allowed: Iterable[str] = ()) -> None:
        """Serves adapters of the base `model`, only from `allowed` locations
        (core/adapter_store.py)."""
        self._model = model
        self._allowed = tuple(allowed)
        self.served: dict[str, Adapter] = {}
        self._running: Counter[tuple[str, Adapter]] = Counter()
        self._ended = asyncio.Event()  # replaced when set

    async def find(self, name: str, location: str) -> Adapter:
        """Finds the adapter in a folder or repository. Raises if it cannot be served under this
        name."""
        if not is_name(name):
            raise InvalidRequest(f"an adapter's name has {NAME_RULE}", field="lora_name")
        if name == self._model:
            raise InvalidRequest(f"{name!r} is the model itself", field="lora_name")
        check_location(location, self._allowed)
        return await asyncio.to_thread(find_adapter, location)

    def serve(self, name: str, adapter: Adapter | None) -> None:
        """Serves an adapter under the name; None removes the name. Running requests keep theirs."""
        if adapter:
            self.served[name] = adapter
        else:
            self.served.pop(name, None)

    async def wait_idle(self, name: str, adapter: Adapter) -> None:
        """Returns once the last request to the adapter under this name has ended."""
        while self._running[name, adapter]:
            await self._ended.wait()
        del self._running[name, adapter]

    @contextmanager
    def running(self, request: Request) -> Iterator[None]:
        if request.adapter is None:
            yield
            return
        key = (request.model, request.adapter)
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1
            self._ended.set()
            self._ended = asyncio.Event()
