"""A router whose end hangs, as in a library's code."""

from __future__ import annotations

import asyncio
import runpy

from baton.core import process
from baton.router.followed_models import FollowedModels


async def hang(models: FollowedModels) -> None:
    await asyncio.Event().wait()


if __name__ == "__main__":
    FollowedModels.close = hang  # type: ignore[method-assign]
    process.END_SECONDS = 2.0
    runpy.run_module("baton.router", run_name="__main__", alter_sys=True)
