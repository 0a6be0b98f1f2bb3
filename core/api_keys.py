"""The file of API keys.

A key is random and shown once. The file holds its digest: a key has 256 random bits, so a plain
hash reveals nothing about it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

from baton.core.bounds import MAX_PRIORITY
from baton.core.config_values import parse_yaml
from baton.core.errors import InvalidConfig

PREFIX = "baton-"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's entry in the file."""

    name: str
    # SHA-256 of the key, in hexadecimal.
    digest: str
    # Generate calls a second; 0 sets no limit. Bursts may use up to one second's calls.
    rate: float = 0.0
    # Concurrent answers; 0 sets no limit.
    concurrency: int = 0
    # The lowest number that its requests may have: a lower one is raised to it.
    priority: int = 0
    # Allows all its requests cached answers to questions of at least this similarity (the semantic
    # cache); None leaves that to the requests.
    semantic_similarity: float | None = None
    # May drain workers and see others' requests.
    admin: bool = False
    # Names of the models and adapters that it may use, where * stands for anything; empty sets no
    # limit.
    models: tuple[str, ...] = ()

    def may_use(self, model: str) -> bool:
        return not self.models or any(fnmatchcase(model, each) for each in self.models)


def make_key(
    name: str,
    *,
    rate: float = 0.0,
    concurrency: int = 0,
    priority: int = 0,
    semantic_similarity: float | None = None,
    admin: bool = False,
    models: Iterable[str] = (),
) -> tuple[str, ApiKey]:
    """Makes a new key and its entry."""
    secret = PREFIX + secrets.token_urlsafe(32)
    limits = (rate, concurrency, priority, semantic_similarity, admin, tuple(models))
    return secret, _checked(ApiKey(name, digest_of(secret), *limits))


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file. Names are unique."""
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8")) or []
    except OSError as error:
        raise InvalidConfig(f"cannot read the keys in {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} is not valid YAML") from error
    if not isinstance(tree, list):
        raise InvalidConfig(f"{path} must hold a list of keys")
    keys = [_read_key(item, path) for item in tree]
    if len({key.name for key in keys}) < len(keys):
        raise InvalidConfig(f"{path} has two keys of the same name")
    return keys


def write_keys(path: Path, keys: list[ApiKey]) -> None:
    """Replaces the file, which only its owner may read."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    # None is not written, since versions without the field refuse its name.
    given = [
        {name: value for name, value in asdict(key).items() if value is not None} for key in keys
    ]
    try:
        fresh.touch(mode=0o600)
        fresh.write_text(yaml.safe_dump(given, sort_keys=False))
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise InvalidConfig(f"cannot write the keys to {path}: {error.strerror}") from error


def _read_key(item: object, path: Path) -> ApiKey:
    known = {field.name for field in fields(ApiKey)}
    if not isinstance(item, dict) or not {"name", "digest"} <= item.keys() <= known:
        raise InvalidConfig(f"each key in {path} must have {', '.join(sorted(known))}")
    models = item.get("models", [])
    if not isinstance(models, list):
        raise InvalidConfig(f"the models of a key in {path} must be a list of names")
    return _checked(ApiKey(**{**item, "models": tuple(models)}))


def _checked(key: ApiKey) -> ApiKey:
    name = key.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidConfig("a key's name must have 1 to 64 letters, digits, dots, - or _")
    if not isinstance(key.digest, str) or not _DIGEST.fullmatch(key.digest):
        raise InvalidConfig(f"the digest of key {name} is not a SHA-256 digest")
    if not isinstance(key.rate, int | float) or not 0 <= key.rate < math.inf:
        raise InvalidConfig(f"the rate of key {name} must be 0 or more")
    if type(key.concurrency) is not int or key.concurrency < 0:
        raise InvalidConfig(f"the concurrency of key {name} must be 0 or more")
    if type(key.priority) is not int or abs(key.priority) > MAX_PRIORITY:
        raise InvalidConfig(f"the priority of key {name} must be {-MAX_PRIORITY} to {MAX_PRIORITY}")
    similarity = key.semantic_similarity
    if similarity is not None and (
        not isinstance(similarity, int | float) or not 0 <= similarity <= 1
    ):
        raise InvalidConfig(f"the semantic_similarity of key {name} must be 0 to 1")
    if type(key.admin) is not bool:
        raise InvalidConfig(f"admin of key {name} must be true or false")
    if not all(isinstance(each, str) and each for each in key.models):
        raise InvalidConfig(f"the models of key {name} must be names")
    return key
