"""What the soak test takes for a leak; the soak itself is `make soak`."""

from __future__ import annotations

import os
from dataclasses import replace

from tests.soak import leaks
from tests.soak.leaks import ENOUGH, MORE_FILES, MORE_MEMORY, STARTING, Held
from tests.soak.mix import KINDS, Mix, Routers
from tests.soak.run import settings_of

BEFORE = {1: Held("ray::RouterActor", 40, 12, 300 << 20), 2: Held("raylet", 60, 20, 80 << 20)}


def test_processes_are_compared_with_those_of_their_kind() -> None:
    restarted = replace(BEFORE[1], files=40 + MORE_FILES)
    assert list(leaks.grown(BEFORE, {7: restarted, 2: BEFORE[2], 8: Held("new", 9, 9, 9)})) == []
    leaking = replace(restarted, files=restarted.files + 1, memory=(301 << 20) + MORE_MEMORY)
    assert len(list(leaks.grown(BEFORE, {7: leaking}))) == 2


def test_memory_that_a_process_needs_to_start_is_no_leak() -> None:
    loading, flat = [size << 20 for size in range(STARTING)], [500 << 20] * ENOUGH
    assert leaks.climbs(loading + flat) == 0
    assert leaks.climbs(loading) == 0
    rising = [(500 + second) << 20 for second in range(ENOUGH)]
    assert leaks.climbs(loading + rising) == (ENOUGH // 2) << 20


def test_this_process_holds_files_threads_and_memory() -> None:
    (held,) = leaks.measure({os.getpid(): "python -m pytest", 0: "gone"}).values()
    assert held.title == "python"
    assert held.files > 2
    assert held.threads > 0
    assert held.memory > 1 << 20


def test_a_seed_draws_the_same_round_again_with_every_kind_of_client() -> None:
    first, again = (Mix(Routers([], []), 5, 24, "lora") for _ in range(2))
    assert first.questions == again.questions
    assert {asked.kind for asked in first.questions} == set(KINDS)
    assert settings_of(5) == settings_of(5)
    assert len({str(settings_of(seed)) for seed in range(20)}) > 5
