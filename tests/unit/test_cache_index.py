from __future__ import annotations

import random

import pytest

from baton.core.page_keys import page_keys
from baton.router.placement.worker_state import ASK_AGAIN_AFTER, CacheIndex
from baton.v1 import worker_pb2 as pb

A, B, C, D = CHAIN = page_keys(b"root", range(16), 4)


def stored(number: int, *keys: bytes) -> pb.CacheEvents:
    return pb.CacheEvents(number=number, stored=keys)


def evicted(number: int, *keys: bytes) -> pb.CacheEvents:
    return pb.CacheEvents(number=number, evicted=keys)


def reset(number: int, *keys: bytes) -> pb.CacheEvents:
    return pb.CacheEvents(number=number, reset=True, stored=keys)


@pytest.mark.parametrize(
    ("events", "held", "asks"),
    [
        ([], 0, []),
        ([reset(0)], 0, [False]),
        ([reset(7, A, B)], 2, [False]),
        ([reset(7, A), stored(8, B), stored(9, C, D)], 4, [False] * 3),
        ([reset(7, A, B, C), evicted(8, C)], 2, [False] * 2),
        # Before any reset, what comes is used, and the rest asked for.
        ([stored(3, A)], 1, [True]),
        # A second copy, and one that is late.
        ([reset(7, A), stored(8, B), stored(8, B)], 2, [False] * 3),
        ([reset(7, A), stored(8, B), evicted(6, A)], 2, [False] * 3),
        # One is lost: asked for once, and what comes meanwhile is used.
        ([reset(7, A), stored(9, B), stored(10, C)], 3, [False, True, False]),
        ([reset(7, A), stored(9, B), stored(12, C)], 3, [False, True, False]),
        ([reset(7, A), stored(9, B), reset(9, A, B, C)], 3, [False, True, False]),
        # After a reset of any number, its successor is the next.
        ([reset(7, A), reset(2, A), stored(3, B)], 2, [False] * 3),
        ([reset(7, A), reset(2, A), stored(8, B)], 2, [False, False, True]),
        # A reset forgets what is not in it.
        ([reset(7, A, B), reset(9, B)], 0, [False] * 2),
        ([reset(7, A), evicted(8, B)], 1, [False] * 2),
    ],
)
def test_events_say_what_a_worker_holds(
    events: list[pb.CacheEvents], held: int, asks: list[bool]
) -> None:
    pages = CacheIndex()
    assert [pages.apply(event) for event in events] == asks
    assert pages.leading(CHAIN) == held


def test_a_reset_that_never_comes_is_asked_for_again() -> None:
    pages = CacheIndex()
    asks = [pages.apply(stored(number)) for number in range(5, 6 + ASK_AGAIN_AFTER)]
    assert [number for number, asked in enumerate(asks, 5) if asked] == [5, 5 + ASK_AGAIN_AFTER]


def test_what_is_kept_is_held_but_not_near() -> None:
    pages = CacheIndex()
    pages.apply(reset(0, A, B, C))
    assert not pages.has_saved
    pages.apply(pb.CacheEvents(number=1, kept=[C, D]))
    assert (pages.leading_in_pool(CHAIN), pages.leading(CHAIN), len(pages)) == (2, 4, 4)
    pages.apply(pb.CacheEvents(number=2, stored=[C]))
    assert (pages.leading_in_pool(CHAIN), pages.leading(CHAIN), len(pages)) == (3, 4, 4)
    pages.apply(evicted(3, D))
    assert (pages.leading_in_pool(CHAIN), pages.leading(CHAIN), pages.has_saved) == (3, 3, False)
    pages.apply(pb.CacheEvents(number=9, reset=True, kept=CHAIN))
    assert (pages.leading_in_pool(CHAIN), pages.leading(CHAIN)) == (0, 4)
    pages.add_pending(CHAIN[:2])
    assert (pages.leading_in_pool(CHAIN), pages.leading(CHAIN)) == (2, 4)


@pytest.mark.parametrize("length", range(34))
def test_every_length_of_a_held_prefix_is_found(length: int) -> None:
    chain = page_keys(b"root", range(33), 1)
    pages = CacheIndex()
    pages.apply(reset(0, *chain[:length]))
    assert pages.leading(chain) == min(length, 33)


def test_a_chain_of_another_salt_is_not_held() -> None:
    pages = CacheIndex()
    pages.apply(reset(0, *CHAIN))
    assert pages.leading(page_keys(b"other", range(16), 4)) == 0
    assert pages.leading([]) == 0


def test_a_pending_prompt_counts_until_its_request_ends() -> None:
    pages = CacheIndex()
    pages.apply(reset(1, A))
    for length in (3, 4):
        pages.add_pending(CHAIN[:length])
    assert pages.leading(CHAIN) == 4
    pages.remove_pending(CHAIN)
    assert pages.leading(CHAIN) == 3
    pages.remove_pending(CHAIN[:3])
    assert pages.leading(CHAIN) == 1


class Sender:
    """A worker that stores and evicts, and whose messages travel badly."""

    def __init__(self, randomness: random.Random) -> None:
        self.keys: set[bytes] = set()
        self.number = 0
        self._random = randomness
        self._late: list[pb.CacheEvents] = []

    def change(self, universe: list[bytes]) -> list[pb.CacheEvents]:
        """What arrives of the next message and of earlier ones."""
        chosen = self._random.sample(universe, 3)
        added, gone = set(chosen) - self.keys, set(chosen) & self.keys
        self.keys = (self.keys | added) - gone
        self.number += 1
        message = pb.CacheEvents(number=self.number, stored=added, evicted=gone)
        return self._random.choice([self._lose, self._delay, self._repeat, self._send])(message)

    def reset(self) -> pb.CacheEvents:
        return reset(self.number, *self.keys)

    def _send(self, message: pb.CacheEvents) -> list[pb.CacheEvents]:
        late, self._late = self._late, []
        return [message, *late]

    def _repeat(self, message: pb.CacheEvents) -> list[pb.CacheEvents]:
        return [message, message]

    def _delay(self, message: pb.CacheEvents) -> list[pb.CacheEvents]:
        self._late.append(message)
        return []

    def _lose(self, message: pb.CacheEvents) -> list[pb.CacheEvents]:
        return []


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_repeated_or_late_a_reset_heals(seed: int) -> None:
    randomness = random.Random(seed)
    universe = page_keys(b"root", range(40), 1)
    sender, pages = Sender(randomness), CacheIndex()
    pages.apply(sender.reset())
    asked = False
    for _ in range(200):
        for event in sender.change(universe):
            asked |= pages.apply(event)
        if asked and randomness.random() < 0.3:
            pages.apply(sender.reset())
            asked = False
            assert {key for key in universe if pages.leading([key])} == sender.keys
    # Whatever is still missing is noticed with the next message that arrives.
    sender.number += 1
    asked |= pages.apply(stored(sender.number))
    known = {key for key in universe if pages.leading([key])}
    assert asked or known == sender.keys


def test_where_all_layers_have_windows_a_prefix_is_held_by_its_end() -> None:
    index = CacheIndex()
    index.apply(reset(7, B, C))
    assert index.leading(CHAIN) == 0
    index.windowed = True
    assert (index.leading(CHAIN), index.leading(CHAIN[:1])) == (3, 0)
