"""`python -m baton.decode_worker --config FILE`."""

from __future__ import annotations

from baton.core.types import Role
from baton.worker.standalone import main

main(Role.DECODE)
