"""Functions in forked processes, with an environment of their own.

huggingface_hub reads its environment when it is imported, which is after the fork.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from forks import fork


class Ended(NamedTuple):
    code: int
    out: str
    error: str


class ForkedCall:
    """A function in a process and an environment of its own."""

    def __init__(
        self,
        function: Callable[[tuple[str, ...]], None],
        *arguments: str,
        environment: Mapping[str, str],
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._process = fork(_call, (function, arguments, dict(environment), self._folder.name))

    def wait(self) -> Ended:
        self._process.join(120)
        code = self._process.exitcode
        assert code is not None, "it did not end"
        self._process.close()
        out, error = ((Path(self._folder.name) / name).read_text() for name in ("out", "error"))
        self._folder.cleanup()
        return Ended(code, out, error)


def _call(
    function: Callable[[tuple[str, ...]], None],
    arguments: tuple[str, ...],
    environment: dict[str, str],
    folder: str,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "out"), (2, "error")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    function(arguments)


def run_baton(arguments: tuple[str, ...]) -> None:
    from baton.cli.app import app

    sys.argv = ["baton", *arguments]
    app()


def find_adapters(places: tuple[str, ...]) -> None:
    """Prints place and digest of each, or error and message."""
    from baton.core.adapter_store import find_adapter
    from baton.core.errors import BatonError

    for place in places:
        try:
            adapter = find_adapter(place)
            print(json.dumps([adapter.folder, adapter.digest.hex()]))
        except BatonError as error:
            print(json.dumps([type(error).__name__, error.message]))
