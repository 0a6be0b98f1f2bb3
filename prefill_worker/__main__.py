"""`python -m prefill_worker --config FILE`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.types import Role
from worker.main import main

if TYPE_CHECKING:
    from worker.server import RoleFactory


def import_role() -> RoleFactory:
    from prefill_worker.role import PrefillRole

    return PrefillRole


main(Role.PREFILL, import_role)
