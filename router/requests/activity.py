"""Counts of active requests, of a model and of a whole router, and what a router's models share."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from baton.core.config import RouterConfig
from baton.router.observe.ledger import Ledgers


class ActiveRequests:
    def __init__(self) -> None:
        self.active = 0
        self.idle = asyncio.Event()  # set while nothing is active
        self.idle.set()

    def count(self, change: int) -> None:
        self.active += change
        if self.active:
            self.idle.clear()
        else:
            self.idle.set()


class Activity(ActiveRequests):
    """Of a router: the limit of its requests, their ledgers, and threads for text."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.limit = config.max_requests
        self.finished = 0
        self.draining = False  # no new requests are accepted
        self.ledgers = Ledgers()
        self.threads = ThreadPoolExecutor(config.text_threads, thread_name_prefix="text")
