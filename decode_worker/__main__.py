"""`python -m decode_worker --config FILE`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.types import Role
from worker.main import main

if TYPE_CHECKING:
    from worker.server import RoleFactory


def import_role() -> RoleFactory:
    from decode_worker.role import DecodeRole

    return DecodeRole


main(Role.DECODE, import_role)
