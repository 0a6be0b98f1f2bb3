"""API keys: identify callers and limit what they use.

The key file is checked for changes, so that an added or removed key takes effect within about a
second, without a restart.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.api_keys import ApiKey, digest_of, read_keys
from baton.core.bounds import MAX_PRIORITY
from baton.core.errors import (
    InvalidConfig,
    InvalidRequest,
    PermissionDenied,
    RateLimited,
    Unauthenticated,
)

log = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
SIMILARITY_HEADER = "x-baton-semantic-similarity"
"""Allows answers to similar questions, as the field semantic_similarity does."""
_SCHEME = "bearer "


@dataclass(slots=True)
class Caller:
    """A key and its current use in this router."""

    key: ApiKey
    active: int = 0  # answers in progress
    _tokens: float = 1.0  # token bucket of the key's call rate
    _refilled: float = field(default_factory=lambda: time.monotonic())

    @property
    def admin(self) -> bool:
        return self.key.admin

    def priority(self, requested: int) -> int:
        """The requested priority, or the key's own if that comes later."""
        return max(requested, self.key.priority)

    def check_model(self, model: str) -> None:
        """Raises PermissionDenied for a model that the key may not use. An unserved name gets the
        same error, so that a key learns nothing about others' adapters."""
        if not self.key.may_use(model):
            allowed = ", ".join(map(repr, self.key.models))
            raise PermissionDenied(
                f"this API key may not use the model {model!r}, only {allowed}", field="model"
            )

    def semantic_similarity(self, requested: float | None, header: str) -> float | None:
        """The minimum similarity for reusing the answer to another question: the highest of the
        request's, the header's and the key's. None if none is set."""
        given = [each for each in (requested, self.key.semantic_similarity) if each is not None]
        if header:
            given.append(_parse_similarity(header))
        return max(given, default=None)

    def salt(self, cache_salt: str) -> str:
        """Scopes a cache salt to the key, so that keys share no cached pages. No key name has a
        colon."""
        return f"{self.key.name}:{cache_salt}" if self.key.name else cache_salt

    @contextlib.contextmanager
    def admit(self, answers: int) -> Iterator[None]:
        """Counts `answers` as active. Raises when that exceeds the key's concurrency or rate."""
        limit = self.key.concurrency
        if 0 < limit < answers:
            raise InvalidRequest(f"this API key allows {limit} concurrent answers", field="n")
        if limit and self.active + answers > limit:
            raise RateLimited(
                f"this API key has {self.active} of {limit} concurrent answers in progress",
                retry_after=1.0,
            )
        self._spend_token()
        self.active += answers
        try:
            yield
        finally:
            self.active -= answers

    def _spend_token(self) -> None:
        rate = self.key.rate
        if not rate:
            return
        now = time.monotonic()
        self._tokens = min(max(1.0, rate), self._tokens + (now - self._refilled) * rate)
        self._refilled = now
        if self._tokens < 1:
            raise RateLimited(
                f"this API key allows {rate:g} calls a second",
                retry_after=(1 - self._tokens) / rate,
            )
        self._tokens -= 1


def _parse_similarity(header: str) -> float:
    try:
        similarity = float(header)
    except ValueError:
        similarity = math.nan
    if not 0 <= similarity <= 1:
        raise InvalidRequest(f"{SIMILARITY_HEADER} must be 0 to 1", field=SIMILARITY_HEADER)
    return similarity


ANONYMOUS = Caller(ApiKey("", "", priority=-MAX_PRIORITY, admin=True))
"""Every caller of a router without keys."""


class KeyRing:
    """The keys of one file and their callers. Without a file no key is required."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._callers: list[Caller] = []
        self._modified = 0.0
        self._checked = 0.0
        if self._path:
            self._load(self._path)

    @property
    def required(self) -> bool:
        return self._path is not None

    def caller(self, authorization: str) -> Caller:
        """The caller that an Authorization header names; raises Unauthenticated."""
        if self._path is None:
            return ANONYMOUS
        self._reload_if_changed(self._path)
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise Unauthenticated("an API key is missing: send it as Authorization: Bearer KEY")
        digest = digest_of(authorization[len(_SCHEME) :].strip())
        # Compares all keys, so that the time does not depend on which one matches.
        found = [item for item in self._callers if hmac.compare_digest(digest, item.key.digest)]
        if not found:
            raise Unauthenticated("unknown API key")
        return found[0]

    def named(self, name: str) -> ApiKey:
        """The key with this name. Raises Unauthenticated if it was removed."""
        if self._path is None:
            return ApiKey(name, "")
        self._reload_if_changed(self._path)
        for item in self._callers:
            if item.key.name == name:
                return item.key
        raise Unauthenticated(f"the API key {name!r} was removed")

    def _reload_if_changed(self, path: Path) -> None:
        now = time.monotonic()
        if now - self._checked < RELOAD_SECONDS:
            return
        self._checked = now
        try:
            if path.stat().st_mtime != self._modified:
                self._load(path)
        except (OSError, InvalidConfig) as error:
            log.error("cannot reload the API keys, keeping the old ones: %s", error)

    def _load(self, path: Path) -> None:
        """Reloads the keys. A caller whose key's name stays keeps its counters."""
        before = {item.key.name: item for item in self._callers}
        keys = read_keys(path)
        self._modified = path.stat().st_mtime
        self._callers = [before.get(key.name, Caller(key)) for key in keys]
        for caller, key in zip(self._callers, keys, strict=True):
            caller.key = key
