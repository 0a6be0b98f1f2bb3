"""How every command meets the shell: its last words, and its exit code.

0    it worked
1    it failed; one line on stderr says why
2    it was called wrongly
130  Ctrl-C
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from baton.core.errors import BatonError


@contextmanager
def edge() -> Iterator[None]:
    """Wraps a command's body, and turns what it raises into an exit code."""
    try:
        yield
    except BatonError as error:
        complain(error.message)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def complain(message: str) -> None:
    """Says what went wrong, in one line."""
    typer.echo(f"baton: {' '.join(message.split())}", err=True)


def note(text: str) -> None:
    """Says something beside the output, which stays clean for pipes."""
    typer.secho(text, err=True, dim=True)
