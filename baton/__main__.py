"""`baton`, and `python -m baton`. Without the server, only `--version` works."""

from __future__ import annotations

import importlib.util
import sys

from baton import __version__


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        print(f"baton {__version__}")
        return
    if importlib.util.find_spec("typer") is None:
        sys.exit("baton: only the client is installed; commands need `baton-llm[server]`")
    from baton.cli.app import app

    app()


if __name__ == "__main__":
    main()
