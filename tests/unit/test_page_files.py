from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from second_tiers import FORM, TieredPool, keys

from baton.engine import page_files
from baton.engine.page_files import UNFINISHED
from baton.engine.tier_copies import Tier


def files_in(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.rglob("*") if path.is_file()}


def saved(folder: Path, text: str = "abcd", pages: int = 8, files: int = 100) -> TieredPool:
    """A pool whose pages are in files."""
    made = TieredPool(pages, folder=folder, files=files)
    made.settle()
    made.keep(text)
    made.settle()
    return made


def restarted(folder: Path, files: int = 100) -> TieredPool:
    """A pool of a new process, with what is in the folder."""
    made = TieredPool(folder=folder, files=files)
    made.settle()
    return made


def test_pages_survive_a_restart_bit_by_bit(tmp_path: Path) -> None:
    saved(tmp_path)
    made = restarted(tmp_path)
    assert sorted(made.tier.changes.drain()) == sorted(keys("abcd"))
    assert made.found("abcd") == "abcd"
    assert made.tier.counts[Tier.FILES].restored == 4


def test_only_the_owner_may_read_what_prompts_say(tmp_path: Path) -> None:
    saved(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in files_in(tmp_path).values()} == {0o600}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + 20] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, FORM.file_bytes - 1)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def take_anothers(path: Path) -> None:
    path.write_bytes(
        next(other for other in path.parents[1].rglob("*/*") if other != path).read_bytes()
    )


def spoil_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[9] ^= 1  # the version
    path.write_bytes(content)


def lose(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [flip, cut, grow, empty, take_anothers, spoil_header, lose])
@pytest.mark.parametrize("while_running", [False, True])
def test_a_file_that_is_not_the_page_is_a_miss_and_is_removed(
    damage: object, while_running: bool, tmp_path: Path
) -> None:
    assert callable(damage)
    made = saved(tmp_path)
    made = restarted(tmp_path) if while_running else made
    path = files_in(tmp_path)[keys("abcd")[2].hex()]
    damage(path)
    made = made if while_running else restarted(tmp_path)
    assert made.found("abcd") == "ab"
    made.settle()
    assert made.found("abcd") == "abcd", "computed meanwhile"
    assert made.pool.check_integrity(held=0) == ""


def test_pages_of_another_model_dtype_or_size_are_not_read(tmp_path: Path) -> None:
    saved(tmp_path)
    others = [
        replace(FORM, root=b"root of another."),
        replace(FORM, dtype="bfloat16"),
        replace(FORM, page_size=2 * FORM.page_size),
    ]
    for other in others:
        made = TieredPool()
        made.tier.open_files(tmp_path, 1 << 20, other)
        made.settle()
        assert made.found("abcd") == ""
        saved(tmp_path)


def test_the_least_recently_used_files_make_room(tmp_path: Path) -> None:
    made = saved(tmp_path, "a", pages=2, files=4)
    for letter in "bcdef":
        made.keep(letter)
        made.settle()
    assert set(files_in(tmp_path)) == {keys(letter)[0].hex() for letter in "cdef"}
    assert made.tier.counts[Tier.FILES].evicted == 2
    for age, letter in enumerate("fedc"):
        os.utime(files_in(tmp_path)[keys(letter)[0].hex()], (age, age))
    made = restarted(tmp_path, files=2)
    assert set(files_in(tmp_path)) == {keys(letter)[0].hex() for letter in "cd"}
    assert set(made.tier.keys) == {keys(letter)[0] for letter in "cd"}
    assert made.tier.counts[Tier.FILES].evicted == 2
    made.keep("x")
    made.settle()
    assert set(files_in(tmp_path)) == {keys(letter)[0].hex() for letter in "cx"}


def test_what_a_killed_process_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    saved(tmp_path)
    path = files_in(tmp_path)[keys("a")[0].hex()]
    path.rename(path.with_name(path.name + UNFINISHED))
    made = restarted(tmp_path)
    assert len(made.tier) == len(files_in(tmp_path)) == 3


def test_a_page_that_is_written_while_the_writer_is_behind_is_in_memory_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_files, "MOST_WRITES", 1)
    made = TieredPool(pages=8, folder=tmp_path)
    made.settle()
    made.keep("abcdefgh")
    made.pool.second_tier.advance()
    for _ in range(4):
        made.backgrounds["save-pages"].run()
        made.pool.second_tier.advance()
    assert len(made.backgrounds["write-pages"].tasks) == 1
    assert len(made.tier.tiers[Tier.HOST].cache) == 2, "as many as are to be had without a loss"
    assert made.tier.counts[Tier.FILES].dropped == 1


@contextmanager
def no_room_for_files() -> Iterator[None]:
    """Writes beyond a few bytes fail in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_the_files_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = TieredPool(pages=8, folder=tmp_path)
    made.settle()
    with no_room_for_files(), caplog.at_level(logging.WARNING):
        made.keep("abcd")
        made.settle()
        made.keep("efgh")
        made.settle()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "pages are not kept in files"
    ]
    assert made.tier.files is not None
    assert made.tier.files.failing
    assert files_in(tmp_path) == {}
    assert made.pool.check_integrity(held=0) == ""
    made.tier.files._failing_until = 0.0
    made.keep("xy")
    made.settle()
    assert not made.tier.files.failing
    assert files_in(tmp_path)


def test_a_folder_that_cannot_be_made_costs_the_files_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        made = saved(tmp_path / "file" / "folder")
    assert len(caplog.records) == 1
    made.fill_pool()
    assert made.found("abcd") == ""
    assert made.pool.check_integrity(held=0) == ""


def test_a_worker_that_stops_writes_what_its_pool_holds(tmp_path: Path) -> None:
    made = TieredPool(folder=tmp_path)
    made.keep("abcd")
    for background in made.backgrounds.values():
        background.submit = lambda task: task()  # type: ignore[method-assign]
        background.run()
    made.tier.close(seconds=1.0)
    assert len(files_in(tmp_path)) == 4
