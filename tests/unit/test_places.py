"""What a worker is said to wait for while Ray has no place for it."""

from __future__ import annotations

from baton.cluster.worker_actors import waiting_words

NODES = [{"GPU": 2.0, "CPU": 8.0}, {"baton_decode": 1.0}]


def test_a_worker_that_a_node_could_take_waits_for_its_turn() -> None:
    assert waiting_words({"GPU": 2.0}, NODES) == "waiting for a place"
    assert waiting_words({}, NODES) == "waiting for a place"


def test_a_worker_that_no_node_could_take_says_what_it_wants() -> None:
    words = waiting_words({"GPU": 2.0, "baton_decode": 1.0}, NODES)
    assert words == "waiting for a node that has GPU: 2, baton_decode: 1: none has"
