"""The two roles' classes, by name: a worker may become either, and this package imports neither."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from core import types
from core.config import Config
from kv_transfer.thread import TransferThread
from worker.metrics import WorkerMetrics
from worker.outbox import Outbox
from worker.role import Role

if TYPE_CHECKING:
    from engine.engine import Engine

RoleFactory = Callable[["Engine", TransferThread, Outbox, WorkerMetrics, Config], Role]

_CLASSES = {
    types.Role.PREFILL: ("prefill_worker.role", "PrefillRole"),
    types.Role.DECODE: ("decode_worker.role", "DecodeRole"),
}


def role_factory(role: types.Role) -> RoleFactory:
    module, name = _CLASSES[role]
    return cast(RoleFactory, getattr(importlib.import_module(module), name))
