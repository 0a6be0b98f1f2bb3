"""A worker whose end hangs, as in a library's code; with STUCK_START, also its start. It finds its
role by its name."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from baton.core import process
from baton.core.types import Role
from baton.worker import standalone
from baton.worker.backend import Backend


def hang(*_: Any, **__: Any) -> Any:
    print("hanging", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    if "STUCK_START" in os.environ:
        Backend.load = hang  # type: ignore[method-assign]
    Backend.close = hang  # type: ignore[method-assign]
    process.END_SECONDS = 2.0
    name = sys.argv[sys.argv.index("--name") + 1]
    standalone.main(Role(name.partition("-")[0]))
