"""The names of the LoRA adapters that are served, and the requests that run under each.

A name becomes a digest here, once, when it is added: workers see digests alone. A removed name is
unknown at once; its requests run on, with what they began with.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from baton.core.adapter_store import check_place, find_adapter
from baton.core.errors import InvalidRequest, UnknownModel
from baton.core.types import Adapter, Request

_NAME = re.compile(r"[\w.@:+-]+(/[\w.@:+-]+)*")
MAX_NAME = 128


class AdapterNames:
    def __init__(self, model: str = "", allowed: Iterable[str] = ()) -> None:
        """Adapters of the base `model` from `allowed` places alone (core/adapter_store.py)."""
        self._model = model
        self._allowed = tuple(allowed)
        self.served: dict[str, Adapter] = {}
        self._running: Counter[tuple[str, Adapter]] = Counter()
        self._ended = asyncio.Event()  # replaced when set

    async def read(self, name: str, place: str) -> Adapter:
        """The adapter in a folder or repository; raises why it cannot be served under this
        name."""
        if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
            raise InvalidRequest(
                f"an adapter's name has letters, digits, and . _ - / @ : +, at most {MAX_NAME}",
                field="lora_name",
            )
        if name == self._model:
            raise InvalidRequest(f"{name!r} is the model itself", field="lora_name")
        check_place(place, self._allowed)
        return await asyncio.to_thread(find_adapter, place)

    def name(self, name: str, adapter: Adapter | None) -> None:
        """Serves an adapter under the name, or none; running requests keep theirs."""
        if adapter:
            self.served[name] = adapter
        else:
            self.served.pop(name, None)

    def find(self, name: str, shown: Callable[[str], bool] = lambda _: True) -> Adapter | None:
        """None for the model itself. An unknown name's error lists those that may be shown."""
        if name in ("", self._model):
            return None
        if adapter := self.served.get(name):
            return adapter
        served = ", ".join(map(repr, filter(shown, (self._model, *self.served))))
        raise UnknownModel(
            f"there is no model {name!r} here; this cluster serves {served}", field="model"
        )

    def known(self, name: str) -> Adapter:
        if adapter := self.served.get(name):
            return adapter
        raise UnknownModel(f"there is no adapter {name!r} here", field="lora_name")

    async def wait_idle(self, name: str, adapter: Adapter) -> None:
        """Returns when the last request of the adapter under this name has ended."""
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
