"""`python -m decode_worker --config FILE`."""

from core.types import Role
from decode_worker.role import DecodeRole
from worker.main import main

main(Role.DECODE, DecodeRole)
