"""`baton status` against a real gRPC server, and what it draws."""

from __future__ import annotations

import json

import pytest
from command_line import Terminal, run
from scripted_router import ScriptedRouter

from baton.cli.terminal import refresh
from baton.cli.views import PAGES_WIDTH, duration, page_bar, sparkline
from baton.v1 import worker_pb2


def test_status_shows_the_router_and_a_row_for_each_worker(router: ScriptedRouter) -> None:
    lines = run(router, "status").stdout.splitlines()
    assert lines[0] == (
        f"tale by router-0 at {router.address}, up 1 h 2 min, 4 active, 1 queued, 1234 finished"
    )
    assert [line.split() for line in lines[3:7]] == [
        ["prefill-0", "prefill", "yes", "░" * PAGES_WIDTH, "0", "0", "0", "-"],
        ["127.0.0.1:6001", "0+0+0+16", "of", "16"],
        ["decode-0", "decode", "yes", "██████▓▓▒▒▒░░░░░", "1", "4", "4", "75%"],
        ["127.0.0.1:6002", "6+2+3+5", "of", "16"],
    ]


def test_queued_requests_are_shown_by_priority(router: ScriptedRouter) -> None:
    for priority, requests in ((0, 1), (1000, 40)):
        router.status.queued_priorities.add(priority=priority, requests=requests)
    shown = " ".join(run(router, "status").stdout.split())
    assert "1 queued (1 of priority 0, 40 of priority 1000)," in shown


def test_the_table_and_json_count_the_same_pages_as_free(router: ScriptedRouter) -> None:
    load = json.loads(run(router, "status", "--json").stdout)["workers"][1]["load"]
    lines = run(router, "status").stdout.splitlines()
    leased, quarantined, cached, empty = map(int, lines[6].split()[1].split("+"))
    assert (leased, quarantined) == (load["leased_pages"], load["quarantined_pages"])
    assert (cached, cached + empty) == (load["cached_pages"], load["free_pages"])
    assert "█ leased + ▓ quarantined + ▒ cached + ░ empty; cached and empty pages are free" in lines


def test_status_shows_what_is_in_the_second_tier(router: ScriptedRouter) -> None:
    router.status.workers[1].load.kept_pages = 1234
    assert "1234 in second tier" in run(router, "status").stdout


def test_status_shows_how_many_guesses_were_right(router: ScriptedRouter) -> None:
    router.status.workers[1].load.guessed_tokens = 20
    router.status.workers[1].load.accepted_tokens = 13
    router.status.workers[1].load.guessed_steps = 10
    shown = run(router, "status").stdout
    assert "13 of 20 guesses right" in shown
    assert "2.3 tokens a step with guesses" in shown


def test_status_shows_quantized_weights_and_pages(router: ScriptedRouter) -> None:
    router.status.workers[1].quantization = "int8"
    router.status.workers[1].kv_dtype = "int8"
    lines = [line.strip() for line in run(router, "status").stdout.splitlines()]
    assert lines[7:9] == ["int8 weights", "int8 pages"]
    assert sum("int8" in line for line in lines) == 2


def test_status_shows_a_workers_fault(router: ScriptedRouter) -> None:
    router.status.workers[0].attached = False
    router.status.workers[0].fault = "leaks pages"
    lines = run(router, "status").stdout.splitlines()
    assert lines[3].split()[:3] == ["prefill-0", "prefill", "no"]
    assert "prefill-0: leaks pages" in [line.strip() for line in lines]


def test_status_shows_draining_workers(router: ScriptedRouter) -> None:
    router.status.workers[0].draining = True
    lines = run(router, "status").stdout.splitlines()
    assert lines[3].split()[:3] == ["prefill-0", "prefill", "draining"]


def test_status_has_no_line_for_a_hidden_address(router: ScriptedRouter) -> None:
    for worker in router.status.workers:
        worker.member.address = ""
    lines = run(router, "status").stdout.splitlines()
    assert lines[4].split()[1:] == ["of", "16"]


def test_status_shows_each_misfit_once(router: ScriptedRouter) -> None:
    for worker, other in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")):
        index = ("prefill-0", "decode-0").index(worker)
        router.status.workers[index].misfits.add(worker_id=other, reason="versions differ")
    lines = [line.strip() for line in run(router, "status").stdout.splitlines()]
    assert lines.count("prefill-0 and decode-0: versions differ") == 1
    assert "decode-0 and prefill-0: versions differ" not in lines


def test_status_as_json_is_the_routers_status(router: ScriptedRouter) -> None:
    status = json.loads(run(router, "status", "--json").stdout)
    assert (status["model"], status["finished_requests"]) == ("tale", 1234)
    assert status["workers"][1]["load"]["quarantined_pages"] == 2
    assert status["workers"][1]["member"]["role"] == "decode"


@pytest.mark.parametrize("terminal", [["status", "--watch"]], indirect=True)
def test_watch_shows_what_changes(terminal: Terminal, router: ScriptedRouter) -> None:
    terminal.wait_for("1234 finished")
    router.status.finished_requests = 1235
    terminal.wait_for("1235 finished")
    terminal.press_control_c()
    assert terminal.process.wait(10) == 130


def test_without_a_terminal_every_frame_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    frames = iter(["first", "second"])

    def draw() -> str:
        if frame := next(frames, None):
            return frame
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        refresh(draw, 0)
    assert capsys.readouterr().out.split() == ["first", "second"]


@pytest.mark.parametrize(
    ("leased", "quarantined", "cached", "free"),
    [(0, 0, 0, 1), (1, 1, 1, 2), (1, 1, 1, 998), (333, 333, 333, 334), (0, 7, 0, 0)],
)
def test_every_page_bar_is_equally_long(
    leased: int, quarantined: int, cached: int, free: int
) -> None:
    load = worker_pb2.Load(
        leased_pages=leased, quarantined_pages=quarantined, cached_pages=cached, free_pages=free
    )
    assert len(page_bar(load)) == PAGES_WIDTH


def test_a_worker_that_never_reported_has_no_bar() -> None:
    assert not page_bar(worker_pb2.Load()).plain.strip()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min"), (3723, "1 h 2 min"), (183_600, "2 d 3 h")],
)
def test_a_duration_has_the_two_largest_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_bars_grow_with_their_values() -> None:
    assert sparkline([0.0, 0.1, 4.0, 8.0]) == " ▁▄█"
    assert sparkline([]) == ""
