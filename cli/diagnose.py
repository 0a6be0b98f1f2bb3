"""`baton diagnose`: what holds the cluster back, and what to change."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from baton import Client
from baton.cli import options
from baton.cli.edge import edge
from baton.cli.terminal import print_json
from baton.connection import DEFAULT_ADDRESS
from baton.core.proto_json import to_json
from baton.v1 import cluster_pb2


def diagnose(
    as_json: options.AsJson = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Say what holds the cluster back, with the numbers behind it, and what to change."""
    with edge(), Client(address) as client:
        diagnosis = client.diagnose()
    if as_json:
        print_json(to_json(diagnosis))
    else:
        for line in _lines(diagnosis):
            typer.echo(line)


def _lines(diagnosis: cluster_pb2.Diagnosis) -> Iterator[str]:
    yield typer.style(f"{diagnosis.sentence[:1].upper()}{diagnosis.sentence[1:]}.", bold=True)
    yield ""
    yield from (f"  {line}" for line in diagnosis.evidence)
    if diagnosis.advice:
        yield ""
        yield "What to change:"
        yield from (f"  - {line}" for line in diagnosis.advice)
