"""`baton keys` and `baton certs`: make what `baton serve --keys` and `--tls` use."""

from __future__ import annotations

import socket
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from baton.cli.terminal import AsJson, note, print_json, print_lines, print_result
from baton.core.api_keys import ApiKey, make_key, read_keys, write_keys
from baton.core.bounds import MAX_PRIORITY
from baton.core.errors import InvalidConfig

keys = typer.Typer(help="Make, list and remove API keys.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--file", metavar="FILE", help="The file of keys.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The key's name.")]
DEFAULT_FILE = Path("keys.yaml")

_OWN_HOSTS = ("localhost", "127.0.0.1", "::1")


@keys.command()
def add(
    name: Name,
    rate: float = Option(0.0, min=0.0, help="Calls a second. (default: no limit)"),
    concurrency: int = Option(0, min=0, help="Concurrent answers. (default: no limit)"),
    priority: int = Option(
        0, min=-MAX_PRIORITY, max=MAX_PRIORITY, help="The lowest number its requests may have."
    ),
    semantic_similarity: float | None = Option(
        None,
        "--semantic-similarity",
        min=0.0,
        max=1.0,
        help="Allow cached answers to questions of at least this similarity. (default: none)",
    ),
    admin: bool = Option(False, "--admin", help="May also drain workers and see others' requests."),
    model: list[str] | None = Option(
        None,
        help="A model or adapter that it may use, such as 'acme/*'. Repeatable. (default: all)",
    ),
    file: File = DEFAULT_FILE,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, once: the file keeps only its digest."""
    known = _known(file)
    if any(key.name == name for key in known):
        raise InvalidConfig(f"{file} has a key called {name} already")
    secret, key = make_key(
        name,
        rate=rate,
        concurrency=concurrency,
        priority=priority,
        semantic_similarity=semantic_similarity,
        admin=admin,
        models=model or (),
    )
    # First, since a key in the file that could not be printed would be lost.
    print_result({"key": secret, **_fields(key)}, secret, as_json)
    write_keys(file, [*known, key])
    note(f"{name} is in {file}; serve with --keys {file}")


@keys.command("list")
def show(file: File = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Print every key's name and limits."""
    found = read_keys(file)
    if as_json:
        print_json([_fields(key) for key in found])
    else:
        print_lines(map(_described, found))


@keys.command()
def remove(name: Name, file: File = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Remove a key. Running routers refuse it within about a second."""
    known = _known(file)
    left = [key for key in known if key.name != name]
    if len(left) == len(known):
        raise InvalidConfig(f"{file} has no key called {name}")
    write_keys(file, left)
    if as_json:
        print_json({"name": name, "removed": True})
    note(f"{name} is no longer in {file}")


def _known(file: Path) -> list[ApiKey]:
    return read_keys(file) if file.exists() else []


def _fields(key: ApiKey) -> dict[str, object]:
    """A key's fields but the digest. 0 and an empty list set no limit."""
    return {name: value for name, value in asdict(key).items() if name != "digest"}


def _described(key: ApiKey) -> str:
    limits = [
        f"{key.rate:g} calls a second" if key.rate else "",
        f"{key.concurrency} answers at once" if key.concurrency else "",
        f"priority {key.priority} or later" if key.priority else "",
        f"cached answers from similarity {key.semantic_similarity:g}"
        if key.semantic_similarity is not None
        else "",
        "admin" if key.admin else "",
        f"only {' '.join(key.models)}" if key.models else "",
    ]
    return f"{key.name:<20} {', '.join(filter(None, limits)) or 'no limits'}"


def certs(
    folder: Path = Argument(Path("certs"), help="The folder to fill. (default: certs)"),
    host: list[str] | None = Option(None, help="Another name or address of a node. Repeatable."),
    days: int = Option(365, min=1, help="Days of validity."),
    as_json: AsJson = False,
) -> None:
    """Make certificates for development. An existing authority is reused."""
    from baton.cli.certificates import make_certificates

    hosts = dict.fromkeys((*_OWN_HOSTS, socket.gethostname(), *(host or ())))
    make_certificates(folder, list(hosts), days)
    text = (
        f"{folder} has certificates for {', '.join(hosts)}.\n\n"
        f"  serve        baton serve --tls {folder}\n"
        f"  ask          BATON_TLS={folder} baton generate …\n"
        f"  curl         curl --cacert {folder}/ca.pem https://…\n\n"
        f"Clients need ca.pem and, with --client-certificates, client.pem and client.key.\n"
        f"Nodes need ca.pem, node.pem, node.key and clients-ca.pem. ca.key and\n"
        f"clients-ca.key sign certificates: keep them to yourself."
    )
    print_result({"folder": str(folder), "hosts": list(hosts)}, text, as_json)
