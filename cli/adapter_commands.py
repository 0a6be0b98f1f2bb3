"""`baton adapter`: LoRA adapters of a running cluster."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Argument

from baton import Client
from baton.cli.terminal import Address, AsJson, ModelName, print_result
from baton.connection import DEFAULT_ADDRESS
from baton.core.model_store import hub_name

adapter = typer.Typer(help="Manage LoRA adapters of a running cluster.", no_args_is_help=True)


@adapter.command()
def add(
    name: str = Argument(help="What requests give as their model."),
    folder: str = Argument(
        help="A folder of PEFT or a hub's repository (ORG/NAME[@REVISION]), of adapter_folders."
    ),
    model: ModelName = "",
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Serve an adapter from now on, or another one under its name."""
    place = folder if hub_name(folder) else str(Path(folder).absolute())
    with Client(address) as client:
        digest = client.add_adapter(name, place, model=model).hex()
    print_result({"name": name, "digest": digest}, f"{name} is served ({digest})", as_json)


@adapter.command()
def remove(
    name: str = Argument(help="The adapter's name."),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """End an adapter's name; waits for the requests that run under it."""
    with Client(address) as client:
        client.remove_adapter(name)
    print_result({"name": name}, f"{name} is removed", as_json)


@adapter.command("list")
def list_adapters(as_json: AsJson = False, address: Address = DEFAULT_ADDRESS) -> None:
    """List the adapters that are served."""
    with Client(address) as client:
        names = [model.name for model in client.models() if model.parent]
    print_result({"adapters": names}, "\n".join(names) or "no adapters are served", as_json)
