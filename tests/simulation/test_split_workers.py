"""Seeds in which workers are several processes, each with some heads of every page; and mistakes
about them, made on purpose, that fail some seed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from baton.core.errors import BatonError
from baton.kv_transfer.sharded_transport import ShardedTransport
from baton.kv_transfer.transport import PageWrite

from .cluster import Cluster
from .test_mutations import Patch, fail_some_seed

RARE = {
    "send_the_note_with_the_first_part": 29,
    "fail_with_the_first_part": 36,
    "take_one_process_for_all": 128,
    "forget_to_probe": 68,
}
"""As in test_mutations.py."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "baton.kv_transfer")


@pytest.mark.parametrize(
    "seeds", [range(70), pytest.param(range(70, 300), marks=pytest.mark.faults)], ids=str
)
def test_no_seed_breaks_an_invariant_where_heads_are_split(seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += Cluster(seed, split=True).run()
    assert counts["finished"] > len(seeds)
    for what in ("processes killed", "writes into quarantine", "damaged pages", "pages fetched"):
        assert counts[what] > 0, f"the seeds never saw: {what}"


def send_the_note_with_the_first_part(patch: Patch) -> None:
    """The pages of another process may still be on their way."""
    end_part = ShardedTransport._end_part

    def end(self: ShardedTransport, part: int, error: BatonError | None) -> None:
        number = self._parts.get(part)
        if number is not None and error is None:
            write = self._writes[number]
            note, write.note = write.note, b""
            if note:
                shard, agent = next(iter(self._peers[write.peer].links))
                self._begin(number, shard, PageWrite(agent, note=note))
        end_part(self, part, error)

    patch.setattr(ShardedTransport, "_end_part", end)


def fail_with_the_first_part(patch: Patch) -> None:
    """Another process may still be reading and writing."""
    end_part = ShardedTransport._end_part

    def end(self: ShardedTransport, part: int, error: BatonError | None) -> None:
        number = self._parts.get(part)
        if number is not None and error is not None:
            for other in [each for each in self._parts if self._parts[each] == number]:
                if other != part:
                    del self._parts[other]
            self._writes[number].parts = 1
        end_part(self, part, error)

    patch.setattr(ShardedTransport, "_end_part", end)


def take_one_process_for_all(patch: Patch) -> None:
    """A peer counts as gone with the first of its processes."""
    break_link = ShardedTransport._break

    def break_all(self: ShardedTransport, name: str, place: tuple[int, str], *, gone: bool) -> None:
        if gone:
            self._peers[name].gone |= set(self._peers[name].links)
        break_link(self, name, place, gone=gone)

    patch.setattr(ShardedTransport, "_break", break_all)


def forget_to_probe(patch: Patch) -> None:
    patch.setattr(ShardedTransport, "_probe", lambda self: None)


MUTATIONS = [
    send_the_note_with_the_first_part,
    fail_with_the_first_part,
    take_one_process_for_all,
    forget_to_probe,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_mistake_about_split_workers_is_caught(
    mutate: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    fail_some_seed(partial(Cluster, split=True), RARE[mutate.__name__])
