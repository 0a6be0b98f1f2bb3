"""API keys: the file that keeps them, and what a caller may do with one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from command_line import BATON
from typer.testing import CliRunner

from baton.cli.app import app
from baton.core.api_keys import make_key, read_keys, write_keys
from baton.core.errors import Exhausted, InvalidConfig, InvalidRequest, Unauthenticated
from baton.router.edges import auth
from baton.router.edges.auth import Caller, KeyRing


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def bearer(secret: str) -> str:
    return f"Bearer {secret}"


def test_a_file_keeps_a_keys_limits_and_not_the_key(file: Path) -> None:
    secret, key = make_key(
        "alice", rate=2.5, concurrency=3, priority=7, admin=True, models=["sql", "acme/*"]
    )
    write_keys(file, [key])
    assert read_keys(file) == [key]
    assert secret not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_two_keys_differ_and_have_256_bits_of_chance() -> None:
    first, second = make_key("a")[0], make_key("a")[0]
    assert first != second
    assert len(first.removeprefix("baton-")) == 43


def test_a_key_names_its_caller(file: Path) -> None:
    secrets = {}
    keys = []
    for name in ("alice", "bob"):
        secrets[name], key = make_key(name)
        keys.append(key)
    write_keys(file, keys)
    ring = KeyRing(str(file))
    for name, secret in secrets.items():
        assert ring.caller(bearer(secret)).key.name == name
        assert ring.caller(f"bEARER  {secret} ").key.name == name


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic x", "Bearer baton-wrong", "é"])
def test_a_caller_without_a_key_is_refused(file: Path, header: str) -> None:
    write_keys(file, [make_key("alice")[1]])
    with pytest.raises(Unauthenticated):
        KeyRing(str(file)).caller(header)


def test_without_a_file_no_key_is_required() -> None:
    ring = KeyRing("")
    assert not ring.required
    assert ring.caller("").salt("salt") == "salt"


def test_a_removed_key_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "RELOAD_SECONDS", 0.0)
    (alice, kept), (bob, gone) = make_key("alice"), make_key("bob")
    write_keys(file, [kept, gone])
    ring = KeyRing(str(file))
    before = ring.caller(bearer(alice))
    write_keys(file, [kept])
    os.utime(file, (1, 1))
    with pytest.raises(Unauthenticated):
        ring.caller(bearer(bob))
    assert ring.caller(bearer(alice)) is before


def test_a_broken_file_leaves_the_keys_as_they_were(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "RELOAD_SECONDS", 0.0)
    secret, key = make_key("alice")
    write_keys(file, [key])
    ring = KeyRing(str(file))
    file.write_text("{")
    os.utime(file, (1, 1))
    assert ring.caller(bearer(secret)).key == key


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "alice",
        "[alice]",
        "[{name: alice}]",
        "[{name: 'a b', digest: " + "0" * 64 + "}]",
        "[{name: alice, digest: short}]",
        "[{name: alice, digest: " + "0" * 64 + ", models: [a], models: [b]}]",
        "[{name: alice, digest: " + "0" * 64 + ", rate: -1}]",
        "[{name: alice, digest: " + "0" * 64 + ", rate: .inf}]",
        "[{name: alice, digest: " + "0" * 64 + ", concurrency: 1.5}]",
        "[{name: alice, digest: " + "0" * 64 + ", priority: 1001}]",
        "[{name: alice, digest: " + "0" * 64 + ", admin: 1}]",
        "[{name: alice, digest: " + "0" * 64 + ", speed: 1}]",
        "[{name: alice, digest: " + "0" * 64 + ", models: sql}]",
        "[{name: alice, digest: " + "0" * 64 + ", models: [1]}]",
        "[{name: alice, digest: " + "0" * 64 + ", models: ['']}]",
        "[{name: a, digest: " + "0" * 64 + "}, {name: a, digest: " + "1" * 64 + "}]",
    ],
)
def test_an_invalid_file_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidConfig):
        KeyRing(str(file))


def test_salts_of_two_keys_differ() -> None:
    alice, bob = Caller(make_key("alice")[1]), Caller(make_key("bob")[1])
    assert alice.salt("bob:") != bob.salt("")
    assert alice.salt("") != bob.salt("")


@pytest.mark.parametrize(
    ("models", "name", "allowed"),
    [
        ([], "sql", True),
        (["sql"], "sql", True),
        (["sql"], "sql2", False),
        (["sql"], "", False),
        (["acme/*", "sql"], "acme/one", True),
        (["acme/*", "sql"], "acme", False),
        (["*"], "sql", True),
        (["a*e"], "Ace", False),
    ],
)
def test_a_key_limits_models(models: list[str], name: str, allowed: bool) -> None:
    key = make_key("alice", models=models)[1]
    assert key.may_use(name) is allowed


def test_a_key_limits_concurrent_answers() -> None:
    caller = Caller(make_key("alice", concurrency=3)[1])
    with caller.admit(2), caller.admit(1):
        with pytest.raises(Exhausted) as refused, caller.admit(1):
            pass
        assert refused.value.retry_after
    with caller.admit(3):
        pass
    with pytest.raises(InvalidRequest), caller.admit(4):
        pass


def test_a_key_limits_calls_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(auth.time, "monotonic", lambda: now)
    caller = Caller(make_key("alice", rate=2.0)[1])

    def call(times: int) -> None:
        for _ in range(times):
            with caller.admit(1):
                pass

    for pause, allowed in ((0.0, 1), (0.5, 1), (60.0, 2)):
        now += pause
        call(allowed)
        with pytest.raises(Exhausted) as refused:
            call(1)
        assert refused.value.retry_after == pytest.approx(0.5)


def test_a_key_that_cannot_be_printed_is_not_kept(file: Path) -> None:
    command = [*BATON, "keys", "add", "alice", "--file", str(file)]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, encoding="utf-8", check=False
        )
    message = "baton: cannot write the output: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, message)
    assert not file.exists()


def test_keys_that_cannot_be_written_are_named_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    with pytest.raises(InvalidConfig, match=r"cannot write the keys to .*: Is a directory"):
        write_keys(tmp_path / "keys", [])
    assert list(tmp_path.iterdir()) == [tmp_path / "keys"]


def test_the_command_adds_lists_and_removes_keys(file: Path) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["keys", *arguments, "--file", str(file)])
        return result.exit_code, result.stdout, result.stderr

    similar = ("--semantic-similarity", "0.9")
    models = ("--model", "sql", "--model", "acme/*")
    code, secret, _ = run("add", "alice", "--rate", "5", "--concurrency", "2", *similar, *models)
    assert code == 0
    assert KeyRing(str(file)).caller(bearer(secret.strip())).key.name == "alice"
    assert run("add", "alice")[0] == 1
    code, listed, _ = run("list")
    assert (code, listed.split()[0]) == (0, "alice")
    similarity = "cached answers from similarity 0.9"
    assert f"5 calls a second, 2 answers at once, {similarity}, only sql acme/*" in listed
    assert secret.strip() not in listed
    limits = {"rate": 5.0, "concurrency": 2, "priority": 0, "admin": False}
    assert json.loads(run("list", "--json")[1]) == [
        {"name": "alice", **limits, "semantic_similarity": 0.9, "models": ["sql", "acme/*"]}
    ]
    code, told, _ = run("remove", "alice", "--json")
    assert (code, json.loads(told)) == (0, {"name": "alice", "removed": True})
    assert run("remove", "alice")[0] == 1
    assert read_keys(file) == []
