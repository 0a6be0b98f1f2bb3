"""Who calls: known by an API key, with limits of its own.

The file of keys is looked at again when it changes, so that a key that is added or
taken away counts within a second or so, without a restart.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.api_keys import Key, digest_of, read_keys
from baton.core.errors import Exhausted, InvalidConfig, InvalidRequest, Unauthenticated

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
_SCHEME = "bearer "


@dataclass(slots=True)
class Caller:
    """Who calls: a key, and what it has under way in this router."""

    key: Key
    active: int = 0
    _saved: float = 1.0  # calls that may come at once
    _looked: float = field(default_factory=lambda: time.monotonic())

    @property
    def admin(self) -> bool:
        return self.key.admin

    def salted(self, cache_salt: str) -> str:
        """Keys share no cached work, whatever salts their requests have: no name has a colon."""
        return f"{self.key.name}:{cache_salt}" if self.key.name else cache_salt

    @contextlib.contextmanager
    def admitted(self, answers: int) -> Iterator[None]:
        """While so many answers are under way. Raises when they are too many, or too soon."""
        most = self.key.concurrency
        if 0 < most < answers:
            raise InvalidRequest(f"this API key allows {most} answers at once", field="n")
        if most and self.active + answers > most:
            raise Exhausted(
                f"this API key has {self.active} of {most} answers under way", retry_after=1.0
            )
        self._spend_a_call()
        self.active += answers
        try:
            yield
        finally:
            self.active -= answers

    def _spend_a_call(self) -> None:
        rate = self.key.rate
        if not rate:
            return
        now = time.monotonic()
        self._saved = min(max(1.0, rate), self._saved + (now - self._looked) * rate)
        self._looked = now
        if self._saved < 1:
            raise Exhausted(
                f"this API key allows {rate:g} calls a second",
                retry_after=(1 - self._saved) / rate,
            )
        self._saved -= 1


EVERYBODY = Caller(Key("", "", admin=True))
"""Where no keys are asked for."""


class KeyRing:
    """The keys of one file, and their callers. Without a file everybody may call."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._callers: list[Caller] = []
        self._changed = 0.0
        self._looked = 0.0
        if self._path:
            self._load(self._path)

    @property
    def locked(self) -> bool:
        return self._path is not None

    def caller(self, authorization: str) -> Caller:
        """Who sends this header; raises Unauthenticated when nobody we know does."""
        if self._path is None:
            return EVERYBODY
        self._look(self._path)
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise Unauthenticated("an API key is missing: send it as Authorization: Bearer KEY")
        digest = digest_of(authorization[len(_SCHEME) :].strip())
        # All are compared, however early one fits.
        found = [item for item in self._callers if hmac.compare_digest(digest, item.key.digest)]
        if not found:
            raise Unauthenticated("this API key is not known")
        return found[0]

    def _look(self, path: Path) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        try:
            if path.stat().st_mtime != self._changed:
                self._load(path)
        except (OSError, InvalidConfig) as error:
            log.error("the keys stay as they were: %s", error)

    def _load(self, path: Path) -> None:
        """What a key has under way goes on counting."""
        before = {item.key.name: item for item in self._callers}
        keys = read_keys(path)
        self._changed = path.stat().st_mtime
        self._callers = [before.get(key.name, Caller(key)) for key in keys]
        for caller, key in zip(self._callers, keys, strict=True):
            caller.key = key
