"""What a process leaves behind, as its successor finds it: real processes that really die."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.core.config import parse
from baton.core.errors import ModelNotFound
from baton.core.types import AttemptKey, Role, Sampling, Work
from baton.worker import step_record
from baton.worker.step_record import Row, StepRecord, judge, open_record
from baton.worker.worker_server import WorkerServer


def row(name: str) -> Row:
    return SimpleNamespace(work=Work(AttemptKey(name, 1), [1], Sampling(), 1, frozenset()))


ROWS = [row("a"), row("b")]


def judged(record: StepRecord, fault: str = "", oom_kills: int = -1) -> tuple[bool, set[str]]:
    verdict = judge(record.memory, fault, oom_kills)
    return verdict.crashed, set(verdict.suspects)


def test_only_the_rows_of_a_step_that_crashed_are_suspects() -> None:
    record = StepRecord()
    record.begin([row("old")])
    record.end()
    record.begin(ROWS)
    assert judged(record) == (False, set())
    record.crash(RuntimeError("CUDA error: an illegal memory access"))
    assert judged(record) == (True, {"a", "b"})


def test_all_steps_in_flight_are_suspect() -> None:
    record = StepRecord()
    record.crash(RuntimeError("device lost"))
    seen = []
    for rows in ([row("a")], [row("b")], [row("c")]):
        record.begin(rows)
        seen.append(judged(record)[1])
        if len(seen) > 1:
            record.end()
            seen.append(judged(record)[1])
    record.end()
    assert [*seen, judged(record)[1]] == [{"a"}, {"a", "b"}, {"b"}, {"b", "c"}, {"c"}, set()]


def test_a_step_of_the_same_rows_is_noted_again() -> None:
    record = StepRecord()
    record.crash(RuntimeError("device lost"))
    for _ in range(5):
        record.begin(ROWS)
        assert judged(record) == (True, {"a", "b"})
        record.end()
        assert judged(record) == (True, set())


def test_a_request_that_is_prepared_is_a_suspect() -> None:
    record = StepRecord()
    with pytest.raises(MemoryError), record.accepting("a"):
        raise MemoryError
    record.crash(MemoryError())
    assert judged(record) == (True, {"a"})
    with record.accepting("b"):
        pass
    assert judged(record) == (True, set())


def test_more_names_than_fit_accuse_and_acquit_nobody() -> None:
    record = StepRecord()
    record.begin([row("x" * 1000) for _ in range(100)])
    record.crash(RuntimeError("device lost"))
    assert judged(record) == (True, set())


def test_the_first_error_is_the_cause() -> None:
    record = StepRecord()
    record.crash(RuntimeError("device lost"))
    record.crash(ValueError("a consequence"))
    assert judge(record.memory, "", -1).ended == "RuntimeError: device lost"


@pytest.mark.parametrize(
    ("before", "now", "crashed"), [(3, 3, False), (3, 4, True), (-1, 4, False)]
)
def test_a_kill_for_lack_of_memory_is_a_crash(
    monkeypatch: pytest.MonkeyPatch, before: int, now: int, crashed: bool
) -> None:
    record = StepRecord()
    monkeypatch.setattr(step_record, "_oom_kills", lambda: before)
    record.refresh()
    record.begin(ROWS)
    assert judged(record, oom_kills=now) == (crashed, {"a", "b"} if crashed else set())


def test_a_fault_of_another_thread_accuses_no_row() -> None:
    record = StepRecord()
    record.begin(ROWS)
    fault = (
        'Fatal Python error: Segmentation fault\n\n  File "/x/transfer_thread.py", line 3 in run'
    )
    assert judged(record, fault) == (True, set())
    assert judged(record, fault.replace("transfer", "engine")) == (True, {"a", "b"})
    assert judged(record, "Fatal Python error: Segmentation fault\n") == (True, {"a", "b"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(step_record, "_folder", lambda: tmp_path)
    yield tmp_path
    # The last record of this process had taken over the test run's faults.
    faulthandler.enable(sys.__stderr__)


def run(folder: Path, name: str, ending: str) -> int:
    """A process that notes a step, and ends so."""
    program = f"""
        import os, signal, sys
        from pathlib import Path
        from types import SimpleNamespace
        from baton.core.types import AttemptKey, Sampling, Work
        from baton.worker import step_record
        step_record._folder = lambda: Path({str(folder)!r})
        record = step_record.open_record({name!r})
        work = Work(AttemptKey("a", 1), [1], Sampling(), 1, frozenset())
        record.begin([SimpleNamespace(work=work)])
        print(record.incarnation, flush=True)
        {ending}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return int(done.stdout)


@pytest.mark.parametrize(
    ("ending", "crashed", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", False, "killed from outside"),
        ("os.kill(os.getpid(), signal.SIGTERM)", False, "killed from outside"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", True, "Segmentation fault"),
        ("os.abort()", True, "Aborted"),
        ("import ctypes; ctypes.string_at(8)", True, "Segmentation fault"),
        ("record.crash(RuntimeError('device lost'))", True, "RuntimeError: device lost"),
    ],
)
def test_a_successor_learns_how_the_process_before_ended(
    folder: Path, ending: str, crashed: bool, text: str
) -> None:
    incarnation = run(folder, "w", ending)
    (verdict,) = open_record("w").verdicts
    assert (verdict.incarnation, verdict.crashed) == (incarnation, crashed)
    assert text in verdict.ended
    # The stack is this program's, not the engine thread's.
    assert list(verdict.suspects) == (["a"] if "record" in ending else [])


def test_a_record_is_read_once_and_within_its_scope(folder: Path) -> None:
    run(folder, "w/1", "os.kill(os.getpid(), signal.SIGKILL)")
    assert not open_record("w/2").verdicts
    assert len(open_record("w/1").verdicts) == 1
    assert not open_record("w/1").verdicts


def test_a_worker_judges_those_of_its_scope_that_end_beside_it(folder: Path) -> None:
    record, ended = open_record("w"), []
    for _ in range(2):
        ended.append(run(folder, "w", "os.kill(os.getpid(), signal.SIGKILL)"))
        record.judge_others()
    assert [each.incarnation for each in record.verdicts] == ended


def test_an_orderly_end_leaves_nothing(folder: Path) -> None:
    run(folder, "w", "record.close()")
    assert list(folder.iterdir()) == []


def test_a_start_that_failed_leaves_nothing(folder: Path) -> None:
    config = parse({"model": str(folder / "missing"), "device": "cpu"})
    server = WorkerServer(config, Role.DECODE, "decode-0", record=open_record("w"))
    with pytest.raises(ModelNotFound):
        asyncio.run(server.start("127.0.0.1", 0))
    assert list(folder.iterdir()) == []


def test_a_process_that_lives_is_not_judged(folder: Path) -> None:
    record = open_record("w")
    assert not open_record("w").verdicts
    assert len(list(folder.glob("*.steps"))) == 2
    record.close()


def test_what_nobody_comes_back_for_is_removed(folder: Path) -> None:
    run(folder, uuid.uuid4().hex, "os.kill(os.getpid(), signal.SIGKILL)")
    (left,) = folder.glob("*.steps")
    os.utime(left, (0, 0))
    open_record("w").close()
    assert list(folder.iterdir()) == []


def test_the_record_of_a_long_life_waits_for_the_next_process(folder: Path) -> None:
    aged = "os.utime(record._path, (0, 0)); record.refresh()"
    ended = run(folder, "w", f"{aged}; os.kill(os.getpid(), signal.SIGKILL)")
    open_record("another").close()
    assert [verdict.incarnation for verdict in open_record("w").verdicts] == [ended]


def test_a_worker_starts_without_a_place_for_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Path:
        raise PermissionError(tmp_path)

    monkeypatch.setattr(step_record, "_folder", refuse)
    record = open_record("w")
    record.begin(ROWS)
    record.end()
    record.judge_others()
    record.close()
    assert not record.verdicts
