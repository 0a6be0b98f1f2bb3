from __future__ import annotations

import asyncio
import faulthandler
import math
import re
import resource
import subprocess
import sys
import time

from baton.core.process import OPEN_FILES, StartTimes, StopSignal, limit_end, raise_open_files


def test_a_second_request_stops_immediately() -> None:
    stopping = StopSignal()
    stopping.request()
    assert (stopping.requested.is_set(), stopping.immediate.is_set()) == (True, False)
    stopping.request()
    assert stopping.immediate.is_set()


async def test_waiting_ends_when_the_work_is_done() -> None:
    done = asyncio.Event()
    done.set()
    async with asyncio.timeout(5):
        await StopSignal().wait_at_most(60.0, done)


async def test_the_wait_has_a_bound() -> None:
    async with asyncio.timeout(5):
        await StopSignal().wait_at_most(0.01, asyncio.Event())


async def test_a_hurry_ends_the_wait() -> None:
    stopping = StopSignal()
    asyncio.get_running_loop().call_soon(stopping.immediate.set)
    async with asyncio.timeout(5):
        await stopping.wait_at_most(60.0, asyncio.Event())


def test_the_times_of_a_start_add_up_by_stage() -> None:
    times = StartTimes(time.monotonic() - 100.0)
    times.mark("weights")
    times.mark("pages")
    times.mark("weights")
    found = re.fullmatch(r"(\S+) s: weights (\S+), pages (\S+)", str(times))
    assert found
    total, weights, pages = map(float, found.groups())
    assert total >= weights >= 100.0 > pages


def test_a_process_began_after_its_parent_started_it() -> None:
    before = time.monotonic()
    code = "from baton.core.process import process_began; print(process_began())"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    # The kernel counts in hundredths of a second.
    assert before - 0.02 <= float(ran.stdout) <= time.monotonic()


def test_a_drain_without_a_limit_does_not_limit_the_end() -> None:
    limit_end(math.inf)
    faulthandler.cancel_dump_traceback_later()


def test_as_many_files_may_be_open_as_the_system_permits() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        limit = raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, hard)
        assert limit == (OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES))
        assert raise_open_files() == limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
