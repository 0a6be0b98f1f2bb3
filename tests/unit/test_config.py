from __future__ import annotations

import runpy
from contextlib import nullcontext
from pathlib import Path

import pytest

from baton.core import config
from baton.core.config_values import keys_of
from baton.core.errors import InvalidConfig
from baton.core.tls import check_router

DOCS = Path(__file__).parents[2] / "docs"


def test_the_defaults_are_one_worker_of_each_role() -> None:
    defaults = config.load(None)
    assert (defaults.model, defaults.prefill.workers, defaults.decode.workers) == ("embedded", 1, 1)


def test_a_file_is_read_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("prefill: {workers: 2, kv_memory: 2GiB}\ndecode:\n  workers: 3\n")
    read = config.load(path, {"decode.workers": 5, "router.port": 0})
    assert read.prefill == config.PrefillConfig(workers=2, kv_memory=config.Size(2 * 2**30))
    assert (read.decode.workers, read.router.port) == (5, 0)


def test_on_and_off_are_words_though_yaml_reads_them_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("speculation: off\npage_digests: on\n")
    loaded = config.load(path)
    assert (loaded.speculation, loaded.page_digests) == ("off", "on")


def test_a_dumped_configuration_parses_to_the_same() -> None:
    prefill = {"kv_memory": "3MiB", "resources": {"baton_prefill": 1}}
    tree = {"prefill": prefill, "members": {"workers": ["a:1"]}}
    parsed = config.parse(tree)
    assert config.parse(config.dump(parsed)) == parsed


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"prefil": {}}, ["prefil", "did you mean prefill"]),
        ({"decode": {"max_bach": 3}}, ["decode.max_bach", "did you mean max_batch"]),
        ({"zzz": 1}, ["zzz", "known keys"]),
        ({"router": {"port": "http"}}, ["router.port", "int", "'http'"]),
        ({"router": {"port": 70000}}, ["router.port", "0 to 65535"]),
        ({"prefill": {"workers": True}}, ["prefill.workers", "int"]),
        ({"prefill": {"resources": "baton"}}, ["prefill.resources", "names and numbers"]),
        ({"decode": {"resources": {"baton": "1"}}}, ["decode.resources.baton", "float"]),
        ({"decode": {"resources": {"GPU": 1}}}, ["decode.resources", "GPU", "gpus"]),
        ({"decode": {"resources": {"baton": -1}}}, ["decode.resources", "0.0001 or more", "baton"]),
        ({"adapters": {"sql": 3}}, ["adapters.sql", "str"]),
        ({"adapters": "sql"}, ["adapters", "names and strings"]),
        ({"decode": {"max_batch": -1}}, ["decode.max_batch", "0 or more"]),
        ({"prefill": {"kv_memory": "1 GB/s"}}, ["prefill.kv_memory", "1GiB"]),
        ({"router": {"cors_origins": ["https://a.com/x"]}}, ["router.cors_origins", "no path"]),
        ({"dtype": "int4"}, ["dtype", "bfloat16"]),
        ({"prefill": 3}, ["prefill", "keys and values"]),
        ({"members": {"workers": "a:1"}}, ["members.workers", "list of strings"]),
        ({"router": {"stall_timeout": float("nan")}}, ["router.stall_timeout", "above 0"]),
    ],
)
def test_a_wrong_value_is_named(tree: dict[str, object], words: list[str]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        config.parse(tree)
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "\x00"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match=r"baton\.yaml"):
        config.load(path)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """The first would be dropped, such as a router's keys."""
    path = tmp_path / "baton.yaml"
    path.write_text("router: {keys: keys.yaml}\nrouter: {port: 1}\n")
    with pytest.raises(InvalidConfig, match=r"(?s)the key router is there twice.*line 2"):
        config.load(path)


def test_a_merged_key_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text(
        "prefill: &pool {workers: 2, kv_memory: 1GiB}\ndecode: {<<: *pool, workers: 3}\n"
    )
    loaded = config.load(path)
    assert (loaded.prefill.workers, loaded.decode.workers) == (2, 3)
    assert loaded.decode.kv_memory == 2**30


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no-such"):
        config.load(tmp_path / "no-such.yaml")


@pytest.mark.parametrize(
    ("host", "settings", "refused"),
    [
        ("127.0.0.1", {}, False),
        ("localhost", {}, False),
        ("::1", {}, False),
        ("0.0.0.0", {}, True),
        ("10.0.0.5", {}, True),
        ("gpu-7", {}, True),
        ("0.0.0.0", {"insecure": True}, False),
    ],
)
def test_a_router_beyond_loopback_needs_keys_or_insecure(
    host: str, settings: dict[str, object], refused: bool
) -> None:
    check_router(config.parse({"router": {"host": host, "keys": "keys.yaml"}, **settings}))
    with pytest.raises(InvalidConfig, match="which requires no key") if refused else nullcontext():
        check_router(config.parse({"router": {"host": host}, **settings}))


def test_the_configuration_page_is_generated_from_the_keys() -> None:
    page = runpy.run_path(str(DOCS / "make_configuration.py"))["page"]()
    made_by = "python docs/make_configuration.py > docs/CONFIGURATION.md"
    assert (DOCS / "CONFIGURATION.md").read_text() == page, made_by


def test_every_key_has_a_meaning() -> None:
    for key in keys_of(config.Config):
        assert key.meaning.endswith("."), key.path


def test_a_flag_that_several_keys_share_means_the_same() -> None:
    meanings: dict[str, set[str]] = {}
    for key in keys_of(config.Config):
        meanings.setdefault(key.flag, set()).add(key.meaning)
    shared = {flag for flag, found in meanings.items() if flag and len(found) > 1}
    assert shared == set()
