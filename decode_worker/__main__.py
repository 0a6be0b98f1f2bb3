"""`python -m decode_worker --config FILE`."""

from __future__ import annotations

from core.types import Role
from worker.main import main

main(Role.DECODE)
