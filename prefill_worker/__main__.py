"""`python -m prefill_worker --config FILE`."""

from core.types import Role
from prefill_worker.role import PrefillRole
from worker.main import main

main(Role.PREFILL, PrefillRole)
