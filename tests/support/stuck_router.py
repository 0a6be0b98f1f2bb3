"""A router whose end hangs, as in a library's code; with STUCK_START, also its start."""

from __future__ import annotations

import asyncio
import os
import runpy
from typing import Any

from baton.core import process
from baton.router.followed_models import FollowedModels


async def hang(*_: Any) -> Any:
    print("hanging", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    if "STUCK_START" in os.environ:
        FollowedModels.load = hang  # type: ignore[method-assign]
    FollowedModels.close = hang  # type: ignore[method-assign]
    process.END_SECONDS = 2.0
    runpy.run_module("baton.router", run_name="__main__", alter_sys=True)
