"""`baton keys`: API keys, kept in a file that `baton serve --keys` reads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.edge import edge, note
from baton.cli.terminal import print_json
from baton.core.api_keys import Key, make_key, read_keys, write_keys
from baton.core.errors import InvalidConfig

keys = typer.Typer(help="Make, list and take away API keys.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--file", metavar="FILE", help="Where the keys are kept.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.")]
DEFAULT_FILE = Path("keys.yaml")


@keys.command()
def add(
    name: Name,
    rate: Annotated[float, typer.Option(min=0.0, help="Calls a second. (default: no limit)")] = 0.0,
    concurrency: Annotated[
        int, typer.Option(min=0, help="Answers at once. (default: no limit)")
    ] = 0,
    admin: Annotated[
        bool, typer.Option("--admin", help="May also drain workers and see what others ask.")
    ] = False,
    file: File = DEFAULT_FILE,
    as_json: options.AsJson = False,
) -> None:
    """Make a key and print it, once: the file keeps only its digest."""
    with edge():
        known = _known(file)
        if any(key.name == name for key in known):
            raise InvalidConfig(f"{file} has a key called {name} already")
        secret, key = make_key(name, rate=rate, concurrency=concurrency, admin=admin)
        write_keys(file, [*known, key])
        if as_json:
            print_json({"key": secret, **_fields(key)})
        else:
            typer.echo(secret)
        note(f"{name} is in {file}; serve with --keys {file}")


@keys.command("list")
def show(file: File = DEFAULT_FILE, as_json: options.AsJson = False) -> None:
    """Print every key's name and limits."""
    with edge():
        found = read_keys(file)
    if as_json:
        print_json([_fields(key) for key in found])
        return
    for key in found:
        typer.echo(_described(key))


@keys.command()
def remove(name: Name, file: File = DEFAULT_FILE, as_json: options.AsJson = False) -> None:
    """Take a key away. Routers that run refuse it within a second or so."""
    with edge():
        known = _known(file)
        left = [key for key in known if key.name != name]
        if len(left) == len(known):
            raise InvalidConfig(f"{file} has no key called {name}")
        write_keys(file, left)
        if as_json:
            print_json({"name": name, "removed": True})
        note(f"{name} is no longer in {file}")


def _known(file: Path) -> list[Key]:
    return read_keys(file) if file.exists() else []


def _fields(key: Key) -> dict[str, object]:
    """Without the digest, which is nobody's business; 0 sets no limit."""
    return {name: value for name, value in asdict(key).items() if name != "digest"}


def _described(key: Key) -> str:
    limits = [
        f"{key.rate:g} calls a second" if key.rate else "",
        f"{key.concurrency} answers at once" if key.concurrency else "",
        "admin" if key.admin else "",
    ]
    return f"{key.name:<20} {', '.join(filter(None, limits)) or 'no limits'}"
