"""`baton`, and `python -m baton`. Without the server, only `--version` works."""

from __future__ import annotations

import importlib.util
import signal
import sys

from baton import __version__


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"baton {__version__}")
        return
    if importlib.util.find_spec("typer") is None:
        sys.exit("baton: only the client is installed; commands need `baton-llm[server]`")
    # Until a command runs, which has its own way to end, Ctrl-C would print where imports are.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from typer.main import get_command

    from baton.cli.app import app

    command = get_command(app)
    signal.signal(signal.SIGINT, handler)
    command()


if __name__ == "__main__":
    main()
