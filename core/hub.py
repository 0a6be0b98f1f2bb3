"""Models of a Hugging Face hub: resolved to a commit once, then downloaded by any process.

huggingface_hub downloads: it resumes, takes a lock for each file so that the processes of a machine
share one download, keeps everything in its own cache, and honours HF_TOKEN, HF_HOME, HF_ENDPOINT
and HF_HUB_OFFLINE. A commit that is complete in the cache needs no hub. Importing this module takes
half a second.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import constants, list_repo_files, resolve_revision, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.utils.tqdm import tqdm

from baton.core.errors import (
    BatonError,
    Exhausted,
    InvalidConfig,
    ModelNotFound,
    PermissionDenied,
    Unavailable,
)
from baton.core.model_store import (
    GPTQ_FILE,
    MODELOPT_FILE,
    WEIGHT_FILE,
    WEIGHT_INDEX,
    Report,
    gguf_parts,
    is_gguf,
    weight_files,
)
from baton.core.tokenizer_files import TOKENIZER_FILE, VOCABULARY_FILES, VOCABULARY_PATTERN

if "HF_HUB_VERBOSITY" not in os.environ:
    # Log a failure as one line, without lines for the attempts before it.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

TEXT_FILES = (
    "config.json",
    "adapter_config.json",  # a model that has one is refused
    "generation_config.json",
    MODELOPT_FILE,
    GPTQ_FILE,
    WEIGHT_INDEX,
    TOKENIZER_FILE,
    *VOCABULARY_FILES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEXT_PATTERNS = (VOCABULARY_PATTERN, "additional_chat_templates/*.jinja")
"""With TEXT_FILES, everything downloaded besides weights: no code, and nothing that is
unpickled."""


def resolve(model: str, revision: str) -> str:
    """The commit of a revision; "" is the main branch."""
    with _typed_errors(model, revision):
        return resolve_revision(model, revision=revision or None).resolved


def download(model: str, commit: str, *, weights: bool, report: Report | None = None) -> Path:
    """Downloads a commit's files unless they are cached, and returns their folder.

    Without `report`, a terminal shows a progress bar.
    """
    with _typed_errors(model, commit):
        with _bars() as bars:
            folder = _snapshot(model, commit, TEXT_FILES, TEXT_PATTERNS, tqdm_class=bars)
        if not weights:
            return folder
        title = model if report is None and sys.stderr.isatty() else ""
        with _bars(report, title=title) as bars:
            _snapshot(model, commit, [WEIGHT_FILE], tqdm_class=bars)
            files = weight_files(folder)
            _snapshot(model, commit, files, tqdm_class=bars)
    for file in files:
        if not (folder / file).is_file():
            raise ModelNotFound(
                f"{model} has no {file} (safetensors only; for GGUF give {model}:FILE.gguf)",
                field="model",
            )
    return folder


def download_files(repository: str, commit: str, files: Sequence[str]) -> Path:
    """Downloads those of the files that a commit has, and returns their folder."""
    with _typed_errors(repository, commit), _bars() as bars:
        return _snapshot(repository, commit, files, tqdm_class=bars)


def choose_gguf(model: str, commit: str, wanted: str) -> str:
    """The GGUF file of a commit with the wanted name or quantization."""
    if is_gguf(wanted):
        return wanted
    if constants.HF_HUB_OFFLINE:
        files = _cached_files(model, commit)
    else:
        with _typed_errors(model, commit):
            files = list_repo_files(model, revision=commit)
    return _of_quantization(model, wanted, files)


def download_gguf(model: str, commit: str, wanted: str, report: Report | None = None) -> Path:
    """Downloads all parts of a commit's GGUF file unless they are cached."""
    file = choose_gguf(model, commit, wanted)
    parts = [str(part) for part in gguf_parts(Path(file))[1]]
    title = model if report is None and sys.stderr.isatty() else ""
    with _typed_errors(model, commit), _bars(report, title=title) as bars:
        folder = _snapshot(model, commit, parts, tqdm_class=bars)
    for part in parts:
        if not (folder / part).is_file():
            raise ModelNotFound(f"{model} has no file {part}", field="model")
    return folder / file


def find_gguf(model: str, revision: str, wanted: str) -> Path | None:
    """A GGUF file of a revision, if all of it is in the cache."""
    try:
        folder = _snapshot(model, revision or None, [wanted], local_files_only=True)
    except EntryNotFoundError:
        return None
    files = _cached_files(model, revision)
    file = folder / (wanted if is_gguf(wanted) else _of_quantization(model, wanted, files))
    return file if all(part.is_file() for part in gguf_parts(file)[1]) else None


def _cached_files(model: str, revision: str) -> list[str]:
    with _typed_errors(model, revision):
        folder = _snapshot(model, revision or None, ["*"], local_files_only=True)
    return [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]


def _of_quantization(model: str, wanted: str, files: Sequence[str]) -> str:
    """The first part of the only model whose name ends with the wanted quantization."""
    names = {}
    for file in sorted(filter(is_gguf, files), reverse=True):
        name = gguf_parts(Path(file))[0]
        if not name.startswith("mmproj"):  # an image encoder
            names[name] = file
    ending = re.compile(rf"(.*[-_.])?{re.escape(wanted)}", re.IGNORECASE)
    found = [file for name, file in names.items() if ending.fullmatch(name)]
    if len(found) == 1:
        return found[0]
    which = "several GGUF files" if found else "no GGUF file"
    choice = ", ".join(sorted(found or names.values())) or "none"
    raise ModelNotFound(f"{model} has {which} of {wanted!r}; GGUF files: {choice}", field="model")


def find(model: str, revision: str) -> Path | None:
    """The folder of a revision, if all of it is in the cache."""
    try:
        folder = _snapshot(
            model, revision or None, TEXT_FILES, TEXT_PATTERNS, local_files_only=True
        )
        _snapshot(model, revision or None, [WEIGHT_FILE], local_files_only=True)
        files = weight_files(folder)
        _snapshot(model, revision or None, files, local_files_only=True)
    except EntryNotFoundError:
        return None
    return folder if all((folder / file).is_file() for file in files) else None


def _snapshot(
    model: str,
    revision: str | None,
    files: Sequence[str],
    patterns: Sequence[str] = (),
    **options: Any,
) -> Path:
    patterns = [*map(glob.escape, files), *patterns]
    return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, **options))


@contextlib.contextmanager
def _bars(report: Report | None = None, *, title: str = "") -> Iterator[type[tqdm]]:
    """A class for the library's progress bars. Only the bar that counts bytes is drawn, under a
    title, and reports."""
    made: list[tqdm] = []

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self._counts = settings.get("name") == "huggingface_hub.snapshot_download"
            settings |= {"disable": not (self._counts and title), "desc": title}
            super().__init__(*arguments, **settings)  # type: ignore[no-untyped-call]
            made.append(self)

        def update(self, n: float | None = 1) -> None:
            if self.disable:
                self.n += n or 0
            super().update(n)
            if self._counts and report:
                report(int(self.n))

        def set_description(self, *_: object) -> None:
            """Keeps the title."""

    try:
        yield Bar
    finally:
        for bar in made:
            bar.close()


@contextlib.contextmanager
def _typed_errors(model: str, revision: str) -> Iterator[None]:
    try:
        yield
    except BatonError:
        raise
    except HFValidationError as error:
        raise ModelNotFound(f"{model!r} is not an id of a model: {error}", field="model") from error
    except HfHubHTTPError as error:
        raise _refusal(error, model, revision) from error
    except (EntryNotFoundError, RevisionResolutionError) as error:
        raise _unreachable(error, model) from error
    except (httpx2.HTTPError, OSError, RuntimeError) as error:  # RuntimeError: hf_xet's
        raise _broken_off(error, model) from error


def _refusal(error: HfHubHTTPError, model: str, revision: str) -> BatonError:
    """Translates the hub's error."""
    hub, status = constants.ENDPOINT, error.response.status_code
    if isinstance(error, GatedRepoError):
        return PermissionDenied(
            f"{model} is gated: accept its terms at {hub}/{model}, and set HF_TOKEN to a token of"
            " that account",
            field="model",
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFound(f"{model} has no revision {revision!r} at {hub}", field="model")
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFound(
            f"there is no folder {model!r} here and no such model at {hub}; for a private one, set"
            " HF_TOKEN",
            field="model",
        )
    if status in (401, 403):
        return PermissionDenied(f"{hub} refused the token in HF_TOKEN ({status})", field="model")
    return Unavailable(f"{hub} answered {status} for {model}")


def _unreachable(error: Exception, model: str) -> BatonError:
    if constants.HF_HUB_OFFLINE:
        return Unavailable(f"{model} is not fully in the cache, and HF_HUB_OFFLINE is set")
    why = str(error.__cause__ or error).partition("\n")[0]
    return Unavailable(
        f"{model} is not in the cache, and {constants.ENDPOINT} cannot be reached: {why}"
    )


def _broken_off(error: Exception, model: str) -> BatonError:
    """Translates the error that ended a download: the disk's, or else the connection's."""
    where = constants.HF_HUB_CACHE
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error):
        return Exhausted(f"the disk is full: {model} does not fit into {where}, see HF_HOME")
    if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return InvalidConfig(f"cannot write {model} into {where} (HF_HOME): {error}", field="model")
    return Unavailable(
        f"the download of {model} was interrupted ({error}); try again to fetch what is missing"
    )
