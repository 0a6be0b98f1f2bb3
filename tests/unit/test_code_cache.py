"""Compiled code is kept for later processes, and no file can do harm."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llvmlite import ir

from baton.kernels.cpu import code_cache, compiler

pytestmark = pytest.mark.skipif(not compiler.available(), reason="needs compiled kernels")

NUMBER = ir.IntType(32)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "baton" / "kernels"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, not loaded."""
    seen: list[str] = []
    compile_ = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda text: seen.append(text) or compile_(text))
    return seen


def answer(number: int) -> int:
    """Of a function that returns `number`, in its own library."""
    address = compiler.Library(write, number).address("answer")
    return int(ctypes.CFUNCTYPE(ctypes.c_int32)(address)())


def write(number: int) -> ir.Module:
    module = ir.Module("test")
    function = ir.Function(module, ir.FunctionType(NUMBER, []), "answer")
    ir.IRBuilder(function.append_basic_block()).ret(ir.Constant(NUMBER, number))
    return module


def test_the_same_code_is_compiled_once(compiled: list[str], cache: Path) -> None:
    assert [answer(42), answer(43), answer(42)] == [42, 43, 42]
    assert len(compiled) == len(list(cache.iterdir())) == 2
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_code_for_another_cpu_is_not_loaded(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(42)
    version, *cpu = compiler._host()
    monkeypatch.setattr(compiler, "_host", lambda: (f"{version}.1", *cpu))
    answer(42)
    assert len(compiled) == 2


def test_code_of_another_source_is_not_loaded(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(42)
    monkeypatch.setattr(compiler, "source_digest", lambda: "another")
    answer(42)
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"),
        lambda path: path.chmod(0o620),
    ],
    ids=["empty", "cut", "changed", "writable by others"],
)
def test_a_file_that_cannot_be_trusted_is_replaced(
    harm: Callable[[Path], object], compiled: list[str], cache: Path
) -> None:
    answer(42)
    (file,) = cache.iterdir()
    sound = file.read_bytes()
    harm(file)
    assert answer(42) == 42
    assert len(compiled) == 2
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (sound, 0o600)


def test_without_a_folder_every_library_is_compiled(compiled: list[str], cache: Path) -> None:
    cache.parent.write_text("not a folder")
    assert [answer(42), answer(42)] == [42, 42]
    assert len(compiled) == 2


def test_without_a_home_every_library_is_compiled(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert [answer(42), answer(42)] == [42, 42]
    assert len(compiled) == 2


def test_many_may_store_and_load_at_once(cache: Path) -> None:
    code = os.urandom(100_000)

    def both(_: int) -> bytes | None:
        code_cache.store("key", code)
        return code_cache.load("key")

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(both, range(64))) == {code}
    assert [path.name for path in cache.iterdir()] == ["key"]


def test_what_was_not_loaded_for_longest_is_evicted(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(code_cache, "KEPT_FILES", 2)
    for age, key in enumerate("cba"):
        code_cache.store(key, b"code")
        os.utime(cache / key, (age, age))
    assert code_cache.load("b") == b"code"
    code_cache.store("d", b"code")
    assert {path.name for path in cache.iterdir()} == {"b", "d"}
