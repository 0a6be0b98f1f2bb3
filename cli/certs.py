"""`baton certs`: a development CA, and certificates for `baton serve --tls`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.edge import edge
from baton.cli.terminal import print_json

_OWN = ("localhost", "127.0.0.1", "::1")


def certs(
    folder: Annotated[Path, typer.Argument(help="Where they go. (default: certs)")] = Path("certs"),
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address of a node, beside this machine's. Repeatable."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long they are valid.")] = 365,
    as_json: options.AsJson = False,
) -> None:
    """Make certificates for development; an authority that is there already signs again."""
    with edge():
        from baton.cli.certificates import make_certificates

        hosts = dict.fromkeys((*_OWN, socket.gethostname(), *(host or ())))
        make_certificates(folder, list(hosts), days)
    if as_json:
        print_json({"folder": str(folder), "hosts": list(hosts)})
    else:
        typer.echo(
            f"{folder} has certificates for {', '.join(hosts)}.\n\n"
            f"  serve        baton serve --tls {folder}\n"
            f"  ask          BATON_TLS={folder} baton generate …\n"
            f"  curl         curl --cacert {folder}/ca.pem https://…\n\n"
            f"Clients need ca.pem and, with --client-certificates, client.pem and client.key.\n"
            f"Nodes need ca.pem, node.pem, node.key and clients-ca.pem. ca.key and\n"
            f"clients-ca.key make certificates: keep them to yourself."
        )
