"""`baton model` and `baton adapter`: find and download models, and change what a running cluster
serves."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from typer import Argument, Option

from baton import Client, Unavailable
from baton.cli.fleet_commands import PoolChanges, missing_workers, pools_of
from baton.cli.model_pull import pull_model
from baton.cli.terminal import Address, AsJson, ModelName, note, print_result, wait_for
from baton.connection import DEFAULT_ADDRESS
from baton.core import model_store
from baton.core.config_values import read_yaml, set_dotted
from baton.core.model_store import EMBEDDED, hub_name
from baton.v1 import cluster_pb2

_WAIT = Option(600.0, help="Seconds to wait.")
_NAME = Argument(
    EMBEDDED,
    metavar="MODEL",
    help="A hub's model (org/name, org/name@revision, or org/name:Q4_K_M for a GGUF file), a"
    " folder, or a GGUF file."
    " (default: the small model)",
)

model = typer.Typer(help="Fetch and find models, and serve further ones.", no_args_is_help=True)
adapter = typer.Typer(help="Manage LoRA adapters of a running cluster.", no_args_is_help=True)


@model.command()
def pull(name: str = _NAME, as_json: AsJson = False) -> None:
    """Download a model, unless it is there, and print its folder."""
    resolved = model_store.resolve(name)
    folder = pull_model(note) if name == EMBEDDED else model_store.locate(resolved)
    print_result({"model": resolved, "folder": str(folder)}, str(folder), as_json)


@model.command()
def path(name: str = _NAME, as_json: AsJson = False) -> None:
    """Print the folder of a model that is on this machine."""
    folder = model_store.locate(name, download=False)
    print_result({"folder": str(folder)}, str(folder), as_json)


@model.command("add")
def add_model(
    name: str = Argument(help="The name that requests use."),
    location: str = Argument(metavar="MODEL", help="A folder, a GGUF file, or a hub's model."),
    prefill: int | None = Option(None, min=1, help="Prefill workers."),
    decode: int | None = Option(None, min=1, help="Decode workers."),
    config: Path | None = Option(
        None, help="A YAML file of keys for this model alone, such as quantization."
    ),
    wait: float = _WAIT,
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Serve a further model with its own workers. Waits until they serve."""
    keys = read_yaml(config) if config else {}
    known = location == EMBEDDED or hub_name(location)
    keys["model"] = location if known else str(Path(location).expanduser().absolute())
    for key, count in (("prefill.workers", prefill), ("decode.workers", decode)):
        if count is not None:
            set_dotted(keys, key, count)
    show = PoolChanges(quiet=as_json)
    with Client(address) as client:
        client.add_model(name, json.dumps(keys))

        def missing(pools: cluster_pb2.PoolsResponse) -> str:
            pools_of(name, pools)  # raises if it was removed
            own = [worker for worker in pools.workers if worker.model == name]
            for worker in own:
                if worker.error:
                    raise Unavailable(
                        f"{worker.worker_id} cannot start: {worker.error}; `baton model remove"
                        f" {name}` ends the attempts"
                    )
            return missing_workers(own) if own else f"{name} has no workers yet"

        wait_for(lambda: show(client.pools()), missing, wait)
    print_result({"name": name}, f"{name} is served", as_json)


@model.command("remove")
def remove_model(
    name: str = Argument(help="The model's name."),
    wait: float = _WAIT,
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Remove a model, then its workers. Waits for its running requests."""
    show = PoolChanges(quiet=as_json)
    with Client(address) as client:
        client.remove_model(name)

        def missing(pools: cluster_pb2.PoolsResponse) -> str:
            left = any(each.model == name for each in pools.models)
            return f"{name} still has requests or stopping workers" if left else ""

        wait_for(lambda: show(client.pools()), missing, wait)
    print_result({"name": name}, f"{name} is removed", as_json)


@model.command("list")
def list_models(as_json: AsJson = False, address: Address = DEFAULT_ADDRESS) -> None:
    """List the models that are served, without their adapters."""
    with Client(address) as client:
        names = [each.name for each in client.models() if not each.parent]
    print_result({"models": names}, "\n".join(names) or "no models are served", as_json)


@adapter.command("add")
def add_adapter(
    name: str = Argument(help="The name that requests use."),
    folder: str = Argument(
        help="A PEFT folder or a hub's repository (ORG/NAME[@REVISION]) from adapter_folders."
    ),
    model: ModelName = "",
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Serve an adapter, or replace the one of this name."""
    location = folder if hub_name(folder) else str(Path(folder).absolute())
    with Client(address) as client:
        digest = client.add_adapter(name, location, model=model).hex()
    print_result({"name": name, "digest": digest}, f"{name} is served ({digest})", as_json)


@adapter.command("remove")
def remove_adapter(
    name: str = Argument(help="The adapter's name."),
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Remove an adapter. Waits for its running requests."""
    with Client(address) as client:
        client.remove_adapter(name)
    print_result({"name": name}, f"{name} is removed", as_json)


@adapter.command("list")
def list_adapters(as_json: AsJson = False, address: Address = DEFAULT_ADDRESS) -> None:
    """List the adapters that are served."""
    with Client(address) as client:
        names = [model.name for model in client.models() if model.parent]
    print_result({"adapters": names}, "\n".join(names) or "no adapters are served", as_json)
