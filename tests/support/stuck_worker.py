"""A worker whose end hangs, as in a library's code. It finds its role by its name."""

from __future__ import annotations

import sys
import threading

from baton.core.types import Role
from baton.worker import standalone
from baton.worker.backend import Backend


def hang(backend: Backend, *, for_good: bool) -> None:
    threading.Event().wait()


if __name__ == "__main__":
    Backend.close = hang  # type: ignore[method-assign]
    standalone.END_SECONDS = 2.0
    name = sys.argv[sys.argv.index("--name") + 1]
    standalone.main(Role(name.partition("-")[0]))
