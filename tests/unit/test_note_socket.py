"""Notes between agents of one host, over real sockets."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
from forks import fork

from baton.core.errors import WorkerLost
from baton.kv_transfer.note_socket import PIECE_BYTES, NoteSocket
from baton.kv_transfer.transport import Noted

Maker = Callable[[str], NoteSocket]


@pytest.fixture
def make() -> Iterator[Maker]:
    made: list[NoteSocket] = []

    def make_one(agent: str) -> NoteSocket:
        made.append(NoteSocket(agent))
        return made[-1]

    yield make_one
    for one in made:
        one.close()


@pytest.fixture
def pair(make: Maker) -> tuple[NoteSocket, NoteSocket]:
    """`left`, connected to `right`."""
    left, right = make("left"), make("right")
    left.connect("right", right.name)
    return left, right


def test_notes_arrive_in_order_with_their_senders_name(pair: tuple[NoteSocket, NoteSocket]) -> None:
    left, right = pair
    assert left.send("right", b"one")
    assert left.send("right", b"two")
    assert right.poll() == ([Noted("left", b"one"), Noted("left", b"two")], [])
    assert right.poll() == ([], [])


def test_notes_of_several_senders_are_told_apart(make: Maker) -> None:
    target, senders = make("target"), [make("a"), make("b")]
    for sender in senders:
        sender.connect("target", target.name)
        sender.send("target", b"hello")
    notes, _ = target.poll()
    assert {noted.peer for noted in notes} == {"a", "b"}


def test_notes_sent_before_a_sender_closed_are_still_heard(
    pair: tuple[NoteSocket, NoteSocket],
) -> None:
    left, right = pair
    left.send("right", b"last words")
    left.close()
    assert right.poll() == ([Noted("left", b"last words")], [])
    assert right.poll() == ([], [])


def test_a_peer_that_closed_is_found_by_the_next_poll(pair: tuple[NoteSocket, NoteSocket]) -> None:
    left, right = pair
    right.poll()
    assert left.alive("right")
    right.close()
    assert not left.alive("right")
    assert left.poll() == ([], ["right"])
    with pytest.raises(WorkerLost):
        left.send("right", b"too late")


def test_a_peer_that_closed_before_it_accepted_is_found_too(
    pair: tuple[NoteSocket, NoteSocket],
) -> None:
    left, right = pair
    right.close()
    assert not left.alive("right")
    assert left.poll() == ([], ["right"])


def test_a_lost_peer_is_told_no_more_once_it_is_disconnected(
    pair: tuple[NoteSocket, NoteSocket],
) -> None:
    left, right = pair
    right.close()
    left.disconnect("right")
    left.disconnect("right")
    assert left.poll() == ([], [])


def test_connecting_where_nobody_listens_is_refused(make: Maker) -> None:
    with pytest.raises(WorkerLost, match="cannot be reached on this host"):
        make("left").connect("right", "baton-nobody")


def test_a_peer_that_does_not_read_delays_the_note(pair: tuple[NoteSocket, NoteSocket]) -> None:
    left, right = pair
    sent = 0
    while left.send("right", b"%d" % sent):
        sent += 1
    assert left.alive("right")
    heard = right.poll()[0]
    assert left.send("right", b"%d" % sent)
    heard += right.poll()[0]
    assert [int(noted.note) for noted in heard] == list(range(sent + 1))


def test_a_note_of_many_packets_arrives_whole(pair: tuple[NoteSocket, NoteSocket]) -> None:
    left, right = pair
    long = os.urandom(20 * PIECE_BYTES + 1)
    assert left.send("right", long)
    assert left.send("right", b"behind it") is False
    heard: list[Noted] = []
    while not heard:
        heard += right.poll()[0]
        left.poll()
    assert heard == [Noted("left", long)]
    assert left.send("right", b"behind it")


def _listen(pipe: Connection) -> None:
    listening = NoteSocket("child")
    pipe.send(listening.name)
    time.sleep(60)


def test_a_killed_process_is_found(make: Maker) -> None:
    here, there = multiprocessing.Pipe()
    process = fork(_listen, (there,))
    left = make("left")
    left.connect("child", here.recv())
    assert left.alive("child")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert left.poll() == ([], ["child"])
