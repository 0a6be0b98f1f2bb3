"""Memory that is left, and pages that take it only when they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import TINY_MODELS, save

from baton.core import host_memory
from baton.core.errors import InvalidConfig
from baton.core.host_memory import available_bytes
from baton.engine.empty_pages import empty_pages
from baton.engine.engine import Engine
from baton.engine.model_choice import read_model

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(TINY_MODELS["llama"], tmp_path)
    return tmp_path


def limit(group: Path, most: str, used: int, files: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    stat = f"anon {used - files}\nactive_file {files // 2}\ninactive_file {files - files // 2}\n"
    (group / "memory.stat").write_text(stat)


def test_a_control_group_may_leave_less_than_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text("1:name=systemd:/\n0::/pod/worker\n")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(host_memory, "_OWN_GROUP", tmp_path / "own")
    machine = available_bytes()
    assert machine > 100 * MIB
    limit(tmp_path / "groups" / "pod" / "worker", "max", 9 * MIB, 0)
    assert available_bytes() > 100 * MIB
    limit(tmp_path / "groups" / "pod", str(50 * MIB), 30 * MIB, 13 * MIB)
    assert available_bytes() == 33 * MIB


def resident() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


def test_pages_take_memory_when_they_are_written(folder: Path) -> None:
    shape = read_model(folder)
    one = empty_pages(shape, 16, torch.float32, "auto", "cpu", 1, "meta").nbytes
    before = resident()
    pages = empty_pages(shape, 16, torch.float32, "auto", "cpu", 512 * MIB // one, "cpu")
    assert resident() - before < 64 * MIB
    assert not pages[-1].any()
    pages[: 128 * MIB // one] = 1.0
    assert resident() - before > 100 * MIB


def test_more_pages_than_memory_are_refused_at_start(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"pages take .* GiB, and .* of memory are left"):
        Engine.load(folder, kv_memory=1 << 50)
