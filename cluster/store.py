"""Keeps the fleet in Ray's own store, in the cluster's namespace.

A controller that is started again reads what its predecessor had decided, and a
worker that is, its role. The store lives as long as Ray's head does, and with a
Redis behind it as long as that.
"""

from __future__ import annotations

import ray
from ray.experimental import internal_kv

from cluster import fleet as fleets
from cluster.fleet import Fleet

_KEY = "fleet"


def save(fleet: Fleet) -> None:
    internal_kv._internal_kv_put(_KEY, fleets.dump(fleet), namespace=_namespace())


def load() -> Fleet:
    """What was saved last."""
    return fleets.parse(internal_kv._internal_kv_get(_KEY, namespace=_namespace()))


def forget() -> None:
    internal_kv._internal_kv_del(_KEY, namespace=_namespace())


def _namespace() -> str:
    return str(ray.get_runtime_context().namespace)
