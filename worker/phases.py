"""The two roles' classes, by name: a worker may become either, and this package imports neither."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from baton.core import types
from baton.core.config import Config
from baton.kv_transfer.thread import TransferThread
from baton.worker.metrics import WorkerMetrics
from baton.worker.outbox import Outbox
from baton.worker.role import Role

if TYPE_CHECKING:
    from baton.engine.engine import Engine

RoleFactory = Callable[["Engine", TransferThread, Outbox, WorkerMetrics, Config], Role]

_CLASSES = {
    types.Role.PREFILL: ("baton.prefill_worker.role", "PrefillRole"),
    types.Role.DECODE: ("baton.decode_worker.role", "DecodeRole"),
}


def role_factory(role: types.Role) -> RoleFactory:
    module, name = _CLASSES[role]
    return cast(RoleFactory, getattr(importlib.import_module(module), name))
