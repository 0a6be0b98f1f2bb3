"""Keeps the fleet, and what the cluster was started with, in Ray's own store, in the cluster's
namespace.

A controller that is started again reads what its predecessor had decided, and a
worker that is, its role. The store lives as long as Ray's head does, and with a
Redis behind it as long as that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import ray
from ray.experimental import internal_kv

from baton.cluster import fleet as fleets
from baton.cluster.fleet import Fleet

_KEY = "fleet"
_START = "start"


@dataclass(frozen=True, slots=True)
class Start:
    """What a cluster was started with: its configuration, and where its controller listens."""

    tree: dict[str, object]
    controller: str


def save(fleet: Fleet) -> None:
    internal_kv._internal_kv_put(_KEY, fleets.dump(fleet), namespace=_namespace())


def load() -> Fleet:
    """What was saved last."""
    return fleets.parse(internal_kv._internal_kv_get(_KEY, namespace=_namespace()))


def save_start(start: Start) -> None:
    text = json.dumps([start.tree, start.controller])
    internal_kv._internal_kv_put(_START, text, namespace=_namespace())


def load_start() -> Start | None:
    """None where none was saved."""
    text = internal_kv._internal_kv_get(_START, namespace=_namespace())
    return Start(*json.loads(text)) if text else None


def forget() -> None:
    for key in (_KEY, _START):
        internal_kv._internal_kv_del(key, namespace=_namespace())


def _namespace() -> str:
    return str(ray.get_runtime_context().namespace)
