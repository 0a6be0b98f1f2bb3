"""Runs `baton …` in this process or in a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

from scripted_router import ScriptedRouter
from typer.testing import CliRunner, Result

from baton.cli.app import app

BATON = [sys.executable, "-c", "from baton.cli.app import app; app()"]


def run(router: ScriptedRouter, *arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [*arguments, "--address", router.address], input=stdin)


class Terminal:
    """A command in its own terminal."""

    def __init__(self, *arguments: str) -> None:
        self._screen, inside = pty.openpty()
        termios.tcsetwinsize(inside, (40, 160))
        self.process = subprocess.Popen(
            [*BATON, *arguments],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "160"},
        )
        os.close(inside)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def press_control_c(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait_for(self, text: str) -> None:
        """Reads until `text` is shown, and drops everything up to it."""
        deadline = time.monotonic() + 20
        while text not in self.shown:
            left = max(0.0, deadline - time.monotonic())  # what came during a stall counts
            ready, _, _ = select.select([self._screen], [], [], left)
            assert ready, f"{text!r} never came; the terminal shows {self.shown!r}"
            self.shown += os.read(self._screen, 4096).decode()
        self.shown = self.shown.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)
