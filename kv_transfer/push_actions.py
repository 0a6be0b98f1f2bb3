"""What a push (kv_transfer/sender.py) wants done."""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.types import DeviceEvent


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Write pages and then the note, if any. Answer with write_done or write_failed."""

    local_pages: tuple[int, ...]
    remote_pages: tuple[int, ...]
    note: bytes
    after: DeviceEvent | None = None


@dataclass(frozen=True, slots=True)
class SendNote:
    """Send a note alone. No answer is wanted."""

    note: bytes


@dataclass(frozen=True, slots=True)
class Introduce:
    """Tell the receiver once more how it reaches us."""


@dataclass(frozen=True, slots=True)
class Silent:
    """The receiver has not answered for a lease's time: no push to it will succeed now."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class Fail:
    """The push is given up, but a write is still under way: Ended follows."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class Overdue:
    """The push was given up a while ago, and its write is still under way."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The push is over. It arrived unless there is an `error`."""

    error: BatonError | None
    bytes: int
    seconds: float
    exposed_seconds: float


Action = StartWrite | SendNote | Introduce | Silent | Fail | Overdue | Ended
