"""Exit codes, output, waiting and options, shared by all commands.

Exit codes:

0    success
1    failure; one line on stderr says why
2    wrong usage
130  Ctrl-C
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import inspect
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from google.protobuf.message import Message
from typer.core import TyperGroup

from baton import BatonError, DeadlineExceeded, Unavailable
from baton.core.proto_json import to_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress
    from rich.table import Table

_PIPE_WIDTH = 160
"""Columns without a terminal, so that a pipe gets whole cells."""

_POLL_SECONDS = 0.2

_UNWRITABLE = {errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC}
"""Why an output cannot be written, except for a broken pipe, whose reader has seen enough."""

Seen = TypeVar("Seen")
Command = TypeVar("Command", bound=Callable[..., None])

Address = Annotated[str, typer.Option(metavar="HOST:PORT", help="The router's address.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ModelName = Annotated[
    str, typer.Option("--model", help="The model's name; required if several are served.")
]
Worker = Annotated[str, typer.Argument(metavar="WORKER", help="A name from `baton status`.")]
RayAddress = Annotated[str, typer.Option(help="The Ray cluster.")]


class CommandGroup(TyperGroup):
    """Turns errors of commands, and of their output, into exit codes."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        _open_streams()
        try:
            return super().main(*arguments, **options)
        except OSError as error:
            if not error.filename and error.errno not in _UNWRITABLE:
                raise
            print_error(f"{error.filename or 'cannot write the output'}: {error.strerror}")
            sys.exit(1)
        finally:
            _drop_unwritten()

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BatonError as error:
            print_error(error.message)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _open_streams() -> None:
    """Opens the standard streams that were closed when the command started, and has stdout replace
    what its encoding lacks."""
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY))
    # Writing to it fails, since an answer or a key must not be lost in silence.
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _drop_unwritten() -> None:
    """Drops what could not be written: Python would try again at its end, and report it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(text: str, *, err: bool = False, dim: bool = False) -> None:
    """Prints a line, or drops it if nobody reads it or nothing can hold it."""
    with contextlib.suppress(OSError):
        typer.secho(text, err=err, dim=dim or None)


def print_error(message: str) -> None:
    """Prints an error on one line."""
    say(f"baton: {' '.join(message.split())}", err=True)


def note(text: str) -> None:
    """Prints to stderr, so that stdout stays clean for pipes."""
    say(text, err=True, dim=True)


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def console() -> Console:
    from rich.console import Console

    made = Console()
    if not made.is_terminal:
        made.width = _PIPE_WIDTH
    return made


def grid(*left: str, right: Sequence[str] = (), gap: int = 2, **settings: Any) -> Table:
    """A table without lines: columns to the left, then numbers to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), **settings)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def refresh(draw: Callable[[], RenderableType], seconds: float, *, screen: bool = False) -> None:
    """Redraws until Ctrl-C; without a terminal, each frame is printed below the one before. Errors
    are drawn too, since a router may come back."""
    from rich.live import Live
    from rich.text import Text

    target = console()
    with Live(console=target, auto_refresh=False, screen=screen and target.is_terminal) as live:
        while True:
            try:
                frame = draw()
            except BatonError as error:
                frame = Text(error.message, style="red")
            if target.is_terminal:
                live.update(frame, refresh=True)
            else:  # where Live prints only the last frame, at the end
                target.print(frame)
            time.sleep(seconds)


def progress() -> Progress:
    """A progress bar on stderr, removed when it ends. Tasks have a `summary`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[summary]}"),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def print_json(value: object, *, in_a_line: bool = False) -> None:
    """Prints messages, enums and plain values as JSON for scripts."""
    indent = None if in_a_line else 2
    whole = sys.stdout.encoding.lower().startswith("utf")
    typer.echo(json.dumps(value, indent=indent, ensure_ascii=not whole, default=_json_value))


def _json_value(value: Message | enum.Enum) -> object:
    return to_json(value) if isinstance(value, Message) else value.name.lower()


def print_result(fields: object, text: str, as_json: bool) -> None:
    if as_json:
        print_json(fields)
    else:
        typer.echo(text)


def wait_for(poll: Callable[[], Seen], missing: Callable[[Seen], str], seconds: float) -> Seen:
    """Calls `poll` until nothing is `missing` in its result, which it returns. DeadlineExceeded has
    what is still missing.

    A router or controller that is unavailable is asked again.
    """
    deadline = time.monotonic() + seconds
    noted = ""
    while True:
        try:
            seen = poll()
        except Unavailable as error:
            why = error.message
            if why != noted:
                note(why)
            noted = why
        else:
            why, noted = missing(seen), ""
            if not why:
                return seen
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(why)
        time.sleep(_POLL_SECONDS)


def option(kind: Any, help_text: str, *names: str, **settings: Any) -> Any:
    """The type of an optional flag, for `with_flags`."""
    return Annotated[kind | None, typer.Option(*names, help=help_text, **settings)]


def with_flags(flags: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Adds optional flags to a command, which gets their values in its `**options`.

    `flags` has a type for each name. In the help they come before the command's keyword-only
    flags.
    """

    def decorate(command: Command) -> Command:
        kinds = inspect.Parameter
        own = list(inspect.signature(command, eval_str=True).parameters.values())
        first = [each for each in own if each.kind is kinds.POSITIONAL_OR_KEYWORD]
        last = [each for each in own if each.kind is kinds.KEYWORD_ONLY]
        added = [
            kinds(name, kinds.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in flags.items()
        ]
        # A wrapper, since typer also reads annotations and the command must keep its own.
        shown = functools.wraps(command)(lambda *given, **named: command(*given, **named))
        shown.__signature__ = inspect.Signature([*first, *added, *last])  # type: ignore[attr-defined]
        shown.__annotations__ = {}
        return shown  # type: ignore[return-value]

    return decorate
