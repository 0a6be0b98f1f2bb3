"""What the prefill phase knows of one attempt."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.core.types import Work
from baton.engine.page_pool import Lease
from baton.engine.sequence import Guide
from baton.prefill_worker.chunks import Chunks
from baton.prefill_worker.fetches import Fetch


@dataclass(slots=True)
class Job:
    attachment: int
    work: Work
    push: bool
    arrived: float
    started: float = 0.0
    chunks: Chunks = field(default_factory=Chunks)
    lease: Lease | None = None
    fetch: Fetch | None = None
    delivered: bool = False  # decode's ticket is here
    pushed_pages: int = 0
    released: bool = False
    overdue: bool = False  # released, and a write still reads its pages
    guide: Guide | None = None
