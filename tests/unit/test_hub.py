"""Models of a hub: a hub of our own, the real client, and commands in processes of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import BATON, Terminal
from forked_calls import ForkedCall, run_baton
from gguf_files import write_gguf, write_parts
from text_model import save_text_model
from tiny_hub import TOKEN, TinyHub
from tiny_models import TinyModel, build

from baton.core import model_store
from baton.core.config import Config

NAME = "org/tiny"
NEVER = ("modeling_tiny.py", "pytorch_model.bin", "README.md", "original/model.safetensors")


@pytest.fixture
def hub() -> Iterator[TinyHub]:
    made = TinyHub()
    yield made
    made.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model's files, and others that hubs have beside them."""
    folder = tmp_path_factory.mktemp("model")
    save_text_model(folder)
    (folder / "hf_quant_config.json").write_text("{}")
    (folder / "quantize_config.json").write_text("{}")
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return found | dict.fromkeys(NEVER, b"never to be downloaded")


class Command:
    """`baton …` against the hub, with a home of its own."""

    def __init__(self, hub: TinyHub, home: Path) -> None:
        self._hub = hub
        self._home = home

    def start(self, *arguments: str, **variables: str) -> ForkedCall:
        home = {"XDG_CACHE_HOME": str(self._home)}
        environment = {**self._hub.environment(self._home), **home, **variables}
        return ForkedCall(run_baton, *arguments, environment=environment)

    def pull(self, name: str, **variables: str) -> Path:
        ended = self.start("model", "pull", name, **variables).wait()
        assert ended.error == ""
        return Path(ended.out.strip())

    def resolve(self, name: str) -> dict[str, str]:
        """What a pull says in JSON."""
        found: dict[str, str] = json.loads(self.start("model", "pull", name, "--json").wait().out)
        return found

    def find(self, name: str) -> Path:
        return Path(self.start("model", "path", name).wait().out.strip())

    def fail(self, name: str, *, command: str = "pull", **variables: str) -> str:
        """The one line of a pull that fails."""
        code, out, error = self.start("model", command, name, **variables).wait()
        assert (code, out) == (1, "")
        assert error.startswith("baton: ")
        assert error.count("\n") == 1
        return error.removeprefix("baton: ").rstrip()


@pytest.fixture
def command(hub: TinyHub, tmp_path: Path) -> Command:
    return Command(hub, tmp_path / "home")


def test_a_pull_downloads_a_model_without_code_and_pickles(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    commit = hub.push(NAME, files)
    folder = command.pull(NAME)
    assert folder.name == commit
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found == {name: data for name, data in files.items() if name not in NEVER}
    assert set(hub.downloads().values()) == {1}


def test_a_pull_downloads_named_templates_and_tokenizers_of_other_formats(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    names = ("additional_chat_templates/tool_use.jinja", "spiece.model", "own.tiktoken")
    hub.push(NAME, files | dict.fromkeys((*names, "additional_chat_templates/code.py"), b"{}"))
    folder = command.pull(NAME)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {*names, *files} - {*NEVER}


def test_a_second_pull_downloads_nothing(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    hub.push(NAME, files)
    folder = command.pull(NAME)
    hub.requests.clear()
    assert command.pull(NAME) == folder
    assert not hub.downloads()


def test_shards_are_those_that_the_index_names(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    shards = {"a-1.safetensors": b"one", "a-2.safetensors": b"two"}
    index = {"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors"}}
    whole = {name: data for name, data in files.items() if not name.endswith(".safetensors")}
    whole |= shards | {"consolidated.safetensors": b"the same once more"}
    whole["model.safetensors.index.json"] = json.dumps(index).encode()
    hub.push(NAME, whole)
    folder = command.pull(NAME)
    assert {path.name for path in folder.glob("*.safetensors")} == set(shards)
    assert command.find(NAME) == folder
    hub.push(NAME, whole | {"model.safetensors": b"the single file goes first"})
    folder = command.pull(NAME)
    assert {path.name for path in folder.glob("*.safetensors")} == {"model.safetensors"}
    assert command.find(NAME) == folder


def test_a_revision_is_a_branch_or_a_commit(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    first = hub.push(NAME, files)
    other = hub.push(NAME, files | {"config.json": b"{}"}, branch="other")
    assert command.pull(NAME).name == first
    assert command.pull(f"{NAME}@other").name == other
    assert command.pull(f"{NAME}@{first}").name == first


def test_a_resolved_name_is_the_same_model_when_the_branch_has_moved(
    hub: TinyHub, command: Command, files: dict[str, bytes], tmp_path: Path
) -> None:
    first = hub.push(NAME, files)
    resolved = command.resolve(NAME)["model"]
    assert resolved == f"{NAME}@{first}"
    assert hub.push(NAME, files | {"config.json": b"{}"}) != first
    elsewhere = Command(hub, tmp_path / "another machine's home")
    assert elsewhere.pull(resolved).name == first


def test_a_commit_in_the_cache_needs_no_hub(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    """So workers restart while the hub is away."""
    commit = hub.push(NAME, files)
    folder = command.pull(NAME)
    hub.down = True
    hub.requests.clear()
    assert command.pull(f"{NAME}@{commit}") == folder
    assert not [line for line in hub.requests if NAME in line]
    assert command.pull(NAME, HF_HUB_OFFLINE="1") == folder


def test_processes_of_a_machine_share_one_download(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    hub.push(NAME, files)
    processes = [command.start("model", "pull", NAME) for _ in range(4)]
    folders = {process.wait().out for process in processes}
    assert len(folders) == 1
    assert set(hub.downloads().values()) == {1}


def test_a_download_that_breaks_off_goes_on_where_it_was(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    hub.push(NAME, files | {"model.safetensors": bytes(range(256)) * (100 << 10)})
    hub.cuts = 1
    folder = command.pull(NAME)
    assert (folder / "model.safetensors").read_bytes() == bytes(range(256)) * (100 << 10)
    parts = [line for line in hub.requests if "bytes=" in line]
    assert len(parts) == 1
    assert not parts[0].endswith("bytes=0-")


def test_a_download_that_is_cut_off_says_so_and_the_next_one_completes_it(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    hub.push(NAME, files)
    hub.cuts = 1000
    assert f"the download of {NAME} was interrupted" in command.fail(NAME)
    assert "is not in the cache" in command.fail(NAME, command="path")
    hub.cuts = 0
    hub.requests.clear()
    command.pull(NAME)
    assert len(hub.downloads()) == 1


def test_an_unknown_model_is_named(hub: TinyHub, command: Command) -> None:
    assert command.fail("org/none") == (
        f"there is no folder 'org/none' here and no such model at {hub.url}; for a private one,"
        " set HF_TOKEN"
    )


def test_an_unknown_revision_is_named(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    hub.push(NAME, files)
    assert command.fail(f"{NAME}@none") == f"{NAME} has no revision 'none' at {hub.url}"


def test_a_gated_model_wants_a_token(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    commit = hub.push(NAME, files)
    hub.repositories[NAME].gated = True
    assert command.fail(NAME).startswith(f"{NAME} is gated: accept its terms at {hub.url}/{NAME}")
    assert command.pull(NAME, HF_TOKEN=TOKEN).name == commit


def test_a_private_model_wants_a_token(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    commit = hub.push(NAME, files)
    hub.repositories[NAME].private = True
    assert "for a private one, set HF_TOKEN" in command.fail(NAME)
    assert command.pull(NAME, HF_TOKEN=TOKEN).name == commit


def test_a_model_that_is_not_there_offline_is_named(command: Command) -> None:
    expected = f"{NAME} is not fully in the cache, and HF_HUB_OFFLINE is set"
    assert command.fail(NAME, HF_HUB_OFFLINE="1") == expected


def test_a_hub_that_cannot_be_reached_is_named(command: Command, closed_port: int) -> None:
    url = f"http://127.0.0.1:{closed_port}"
    error = command.fail(NAME, HF_ENDPOINT=url)
    assert error.startswith(f"{NAME} is not in the cache, and {url} cannot be reached: ")


def test_a_hub_that_is_down_is_named(hub: TinyHub, command: Command) -> None:
    hub.down = True
    assert "503" in command.fail(NAME)


def test_a_model_of_pickles_is_refused(
    hub: TinyHub, command: Command, files: dict[str, bytes]
) -> None:
    hub.push(NAME, {name: data for name, data in files.items() if name != "model.safetensors"})
    expected = f"(safetensors only; for GGUF give {NAME}:FILE.gguf)"
    assert command.fail(NAME) == f"{NAME} has no model.safetensors {expected}"


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository with one model in two quantizations, of which one is in two parts."""
    folder, model = tmp_path_factory.mktemp("gguf"), build(TinyModel("llama"))
    write_gguf(folder / "Tiny-Q8_0.gguf", model)
    parts = [folder / f"Tiny-Q4_K_M-0000{part}-of-00002.gguf" for part in (1, 2)]
    write_parts(folder / "Tiny-Q8_0.gguf", parts)
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return found | {"mmproj-Q8_0.gguf": b"for images", "README.md": b"never to be downloaded"}


def test_a_gguf_file_of_a_repository_is_downloaded_alone(
    hub: TinyHub, command: Command, gguf_files: dict[str, bytes]
) -> None:
    hub.push(NAME, gguf_files)
    folder = command.pull(f"{NAME}:q8_0")
    assert (folder / "model.gguf").read_bytes() == gguf_files["Tiny-Q8_0.gguf"]
    assert len(hub.downloads()) == 1
    assert command.pull(f"{NAME}:Tiny-Q8_0.gguf") == folder
    assert command.pull(f"{NAME}:Q8_0", HF_HUB_OFFLINE="1") == folder
    assert command.find(f"{NAME}:Q8_0") == folder
    assert len(hub.downloads()) == 1
    assert "is not in the cache" in command.fail(f"{NAME}:none.gguf", command="path")


def test_the_parts_of_a_gguf_file_are_downloaded_together_and_as_one_commit(
    hub: TinyHub, command: Command, gguf_files: dict[str, bytes]
) -> None:
    commit = hub.push(NAME, gguf_files)
    found = command.resolve(f"{NAME}:Q4_K_M")
    assert found["model"] == f"{NAME}@{commit}:Tiny-Q4_K_M-00001-of-00002.gguf"
    assert len(list(Path(found["folder"]).glob("model-*.gguf"))) == 2
    hub.down = True
    assert str(command.pull(found["model"])) == found["folder"]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("Q5_K_M", "has no GGUF file of 'Q5_K_M'; GGUF files: Tiny-Q4_K_M-00001-of-00002.gguf, "),
        ("none.gguf", "has no file none.gguf"),
    ],
)
def test_a_gguf_file_that_a_repository_lacks_is_named(
    file: str, expected: str, hub: TinyHub, command: Command, gguf_files: dict[str, bytes]
) -> None:
    hub.push(NAME, gguf_files)
    assert command.fail(f"{NAME}:{file}").startswith(f"{NAME} {expected}")


def test_a_full_disk_is_named(hub: TinyHub, files: dict[str, bytes], tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    own_mounts = [unshare or "unshare", "--user", "--map-root-user", "--mount"]
    if not unshare or subprocess.run([*own_mounts, "true"], check=False).returncode:
        pytest.skip("needs user namespaces")
    hub.push(NAME, files)
    small = 'mount -t tmpfs -o size=128k tmpfs $HF_HOME && exec "$@"'
    process = subprocess.run(
        [*own_mounts, "sh", "-c", small, "sh", *BATON, "model", "pull", NAME],
        env=hub.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 1
    last = process.stderr.splitlines()[-1]
    assert last == (
        f"baton: the disk is full: {NAME} does not fit into {tmp_path}/hub, see HF_HOME"
    )


def test_a_download_reports_its_bytes(
    hub: TinyHub, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.push(NAME, files)
    code = (
        "from baton.core import model_store; seen = []\n"
        f"model_store.locate({NAME!r}, report=seen.append); print(seen[-1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=hub.environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == f"{len(files['model.safetensors'])}\n"


def test_a_terminal_shows_a_bar(
    hub: TinyHub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(NAME, files)
    for name, value in hub.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    terminal = Terminal("model", "pull", NAME)
    terminal.wait_for(f"{NAME}: 100%")
    terminal.wait_for(f"{tmp_path}/hub")
    terminal.close()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/name", ("org/name", "", "")),
        ("org/name-1.5_B@refs/pr/4", ("org/name-1.5_B", "refs/pr/4", "")),
        ("org/name:Q4_K_M", ("org/name", "", "Q4_K_M")),
        ("org/name@main:sub/file.gguf", ("org/name", "main", "sub/file.gguf")),
        ("embedded", None),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("~/name", None),
        ("a/b/c", None),
        ("org/name.gguf", None),
    ],
)
def test_a_name_of_a_hub_is_an_organization_and_a_name(
    model: str, expected: tuple[str, str, str] | None
) -> None:
    assert model_store.hub_name(model) == expected


def test_a_folder_goes_before_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    assert model_store.locate("org/name") == Path("org/name")
    assert model_store.resolve("org/name") == str(tmp_path / "org" / "name")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/name@main", "org/name"),
        ("org/name:Q4_K_M", "org/name"),
        ("embedded", model_store.EMBEDDED_NAME),
        ("/models/some-folder", "some-folder"),
        ("/models/Some-Q4_K_M.gguf", "Some-Q4_K_M"),
        ("/models/Some-Q4_K_M-00001-of-00003.gguf", "Some-Q4_K_M"),
    ],
)
def test_clients_know_a_model_by_its_id_or_file(model: str, expected: str) -> None:
    assert model_store.model_name(Config(model=model)) == expected
    assert model_store.model_name(Config(model=model, model_name="mine")) == "mine"
