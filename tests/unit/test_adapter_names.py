"""Names of adapters in a router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.app import app
from baton.core.adapter_store import find_adapter
from baton.core.errors import InvalidAdapter, InvalidRequest
from baton.core.types import Adapter, AttemptKey, Request, Sampling, Work
from baton.core.wire import work_from, work_to
from baton.router.requests.adapter_names import AdapterNames

SQL, CODE = Adapter(b"sql", "/a/sql"), Adapter(b"code", "/a/code")


def request(model: str, adapter: Adapter | None) -> Request:
    return Request("id", "text", Sampling(), 1, model=model, adapter=adapter)


@pytest.fixture
def names() -> AdapterNames:
    names = AdapterNames("base", ["/a"])
    names.serve("sql", SQL)
    return names


@pytest.mark.parametrize("name", ["", "base", "a b", "/a", "a/", "x" * 129, "a\n"])
async def test_what_is_no_name_is_refused(names: AdapterNames, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await names.find(name, "/a/sql")
    assert caught.value.field == "lora_name"


async def test_only_allowed_folders_are_read(tmp_path: Path) -> None:
    names, folder = AdapterNames("base", [str(tmp_path / "a")]), tmp_path / "a" / "sql"
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "a" / "link").symlink_to("/etc")
    assert await names.find("sql", str(folder)) == find_adapter(str(folder))
    for outside in (tmp_path, tmp_path / "a" / "link", folder / ".." / ".." / "other"):
        with pytest.raises(InvalidAdapter, match="not below a folder"):
            await names.find("sql", str(outside))
    with pytest.raises(InvalidAdapter, match="holds no adapter"):
        await names.find("sql", str(folder / "missing"))


async def test_the_end_of_a_name_waits_for_its_requests(names: AdapterNames) -> None:
    names.serve("other", SQL)
    with names.running(request("sql", SQL)), names.running(request("other", SQL)):
        names.serve("sql", CODE)  # another adapter under the name
        await asyncio.wait_for(names.wait_idle("sql", CODE), 5)
        old = asyncio.create_task(names.wait_idle("sql", SQL))
        with names.running(request("sql", CODE)), names.running(request("base", None)):
            await asyncio.sleep(0)
            assert not old.done()
    await asyncio.wait_for(old, 5)


def test_work_carries_the_adapter() -> None:
    for adapter in (None, SQL):
        work = Work(AttemptKey("id", 1), [1], Sampling(), 1, frozenset(), adapter=adapter)
        assert work_from(work_to(work)) == work


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--adapter", "sql"], "'sql' is not NAME=PATH"),
        (["--adapter", "sql=/missing"], "/missing holds no adapter"),
    ],
)
def test_a_command_with_a_bad_adapter_starts_nothing(flags: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code != 0
    assert reason in result.output or reason in str(result.exception)
