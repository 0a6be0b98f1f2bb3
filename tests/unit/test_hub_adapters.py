"""LoRA adapters of a hub: a hub of our own, and the real client in processes of its own, since it
reads its environment once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_calls import ForkedCall, find_adapters
from tiny_hub import TOKEN, TinyHub

from baton.core.adapter_store import check_location, find_adapter
from baton.core.errors import InvalidAdapter

CONFIG = json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}).encode()
FILES = {
    "adapter_config.json": CONFIG,
    "adapter_model.safetensors": b"weights" * 20_000,
    "README.md": b"never to be downloaded",
    "adapter_model.bin": b"never to be downloaded",
    "tokenizer.json": b"never to be downloaded",
}


@pytest.fixture
def hub() -> Iterator[TinyHub]:
    made = TinyHub()
    yield made
    made.close()


def find(hub: TinyHub, home: Path, *places: str, **variables: str) -> list[tuple[str, str]]:
    """Place and digest of each, or error and message."""
    ended = ForkedCall(
        find_adapters, *places, environment={**hub.environment(home), **variables}
    ).wait()
    assert ended.code == 0, ended.error
    return [tuple(json.loads(line)) for line in ended.out.splitlines()]


def test_an_adapter_is_resolved_to_a_commit_and_only_its_files_are_downloaded(
    hub: TinyHub, tmp_path: Path
) -> None:
    old = hub.push("org/sql", FILES)
    new = hub.push("org/sql", {**FILES, "adapter_model.safetensors": b"new" * 50_000}, "v2")
    (tmp_path / "same").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "same" / name).write_bytes(FILES[name])
    home = tmp_path / "home"
    first, again, other = find(hub, home, "org/sql", f"org/sql@{old}", "org/sql@v2")
    assert first == again == (f"org/sql@{old}", find_adapter(str(tmp_path / "same")).digest.hex())
    assert other[0] == f"org/sql@{new}"
    assert other[1] != first[1]
    downloaded = {file.name for file in home.rglob("snapshots/*/*")}
    assert downloaded == {"adapter_config.json", "adapter_model.safetensors"}
    assert set(hub.downloads().values()) == {1}
    hub.down = True
    assert find(hub, home, f"org/sql@{old}") == [first]
    assert find(hub, home, "org/sql", HF_HUB_OFFLINE="1") == [first]


def test_what_is_wrong_is_told_in_one_line(hub: TinyHub, tmp_path: Path) -> None:
    hub.push("org/model", {"config.json": b"{}"})
    hub.push("org/pickled", {"adapter_config.json": CONFIG, "adapter_model.bin": b""})
    hub.push("org/gated", FILES)
    hub.push("org/dora", {**FILES, "adapter_config.json": CONFIG[:-1] + b', "use_dora": true}'})
    hub.repositories["org/gated"].gated = True
    expected = {
        "org/none": "AdapterMissing: there is no folder 'org/none' here and no such model at",
        "org/model@v9": "AdapterMissing: org/model has no revision 'v9'",
        "org/model": "AdapterMissing: org/model holds no adapter: it has no adapter_config.json",
        "org/pickled": "AdapterMissing: org/pickled holds no adapter: it has no adapter_model.safe",
        "org/gated": "PermissionDenied: org/gated is gated: accept its terms",
        "org/dora": "InvalidAdapter: adapter_config.json: use_dora is not supported",
        "org/model:a.gguf": "InvalidAdapter: org/model:a.gguf: an adapter is a repository, not a",
    }
    found = [": ".join(each) for each in find(hub, tmp_path, *expected)]
    for line, wanted in zip(found, expected.values(), strict=True):
        assert line.startswith(wanted)
        assert "\n" not in line
    (allowed,) = find(hub, tmp_path, "org/gated", HF_TOKEN=TOKEN)
    assert allowed[0].startswith("org/gated@")
    hub.down = True
    ((error, told),) = find(hub, tmp_path, "org/new")
    assert (error, "503" in told) == ("Unavailable", True)
    ((error, told),) = find(hub, tmp_path, "org/new", HF_HUB_OFFLINE="1")
    assert (error, "HF_HUB_OFFLINE is set" in told) == ("Unavailable", True)


@pytest.mark.parametrize(
    ("allowed", "place", "wanted"),
    [
        (["hub:org/*"], "org/sql@main", True),
        (["hub:org/sql"], "org/sql", True),
        (["org/sql@abc"], "org/sql@def", True),  # a configured adapter's
        (["hub:org/*"], "organ/sql", False),
        (["/org/sql", "hub:other/*"], "org/sql", False),
        (["hub:*"], "/org/sql", False),
    ],
)
def test_only_allowed_repositories_are_read(allowed: list[str], place: str, wanted: bool) -> None:
    if wanted:
        check_location(place, allowed)
        return
    with pytest.raises(InvalidAdapter, match="that the configuration allows"):
        check_location(place, allowed)
