"""`baton model add` and `remove`: the models of a running cluster."""

from __future__ import annotations

import json
from pathlib import Path

from typer import Argument, Option

from baton import Client, Unavailable
from baton.cli.fleet_commands import PoolChanges, lack_of_workers
from baton.cli.terminal import Address, AsJson, print_result, wait_for
from baton.connection import DEFAULT_ADDRESS
from baton.core.config_values import read_yaml, set_dotted
from baton.core.model_store import EMBEDDED, hub_name
from baton.v1 import cluster_pb2

_WAIT = Option(600.0, help="Seconds to wait.")


def add_model(
    name: str = Argument(help="What requests give as their model."),
    place: str = Argument(metavar="MODEL", help="A folder, a GGUF file, or a hub's model."),
    prefill: int | None = Option(None, min=1, help="Prefill workers."),
    decode: int | None = Option(None, min=1, help="Decode workers."),
    config: Path | None = Option(
        None, help="A YAML file of keys of its own, such as quantization; others are shared."
    ),
    wait: float = _WAIT,
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Serve a further model, with workers of its own. Waits until they serve."""
    keys = read_yaml(config) if config else {}
    known = place == EMBEDDED or hub_name(place)
    keys["model"] = place if known else str(Path(place).expanduser().absolute())
    for key, count in (("prefill.workers", prefill), ("decode.workers", decode)):
        if count is not None:
            set_dotted(keys, key, count)
    show = PoolChanges(quiet=as_json)
    with Client(address) as client:
        client.add_model(name, json.dumps(keys))

        def lack(pools: cluster_pb2.PoolsResponse) -> str:
            own = [worker for worker in pools.workers if worker.model == name]
            for worker in own:
                if worker.error:
                    raise Unavailable(
                        f"{worker.worker_id} cannot start: {worker.error}; `baton model remove"
                        f" {name}` ends the attempts"
                    )
            return lack_of_workers(own)

        wait_for(lambda: show(client.pools()), lack, wait)
    print_result({"name": name}, f"{name} is served", as_json)


def remove_model(
    name: str = Argument(help="The model's name."),
    wait: float = _WAIT,
    as_json: AsJson = False,
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """End a model's name, then its workers. Waits for the requests that run."""
    show = PoolChanges(quiet=as_json)
    with Client(address) as client:
        client.remove_model(name)

        def lack(pools: cluster_pb2.PoolsResponse) -> str:
            left = any(each.model == name for each in pools.models)
            return f"{name} still has requests, or workers that end" if left else ""

        wait_for(lambda: show(client.pools()), lack, wait)
    print_result({"name": name}, f"{name} is removed", as_json)


def list_models(as_json: AsJson = False, address: Address = DEFAULT_ADDRESS) -> None:
    """List the models that are served, without their adapters."""
    with Client(address) as client:
        names = [each.name for each in client.models() if not each.parent]
    print_result({"models": names}, "\n".join(names) or "no models are served", as_json)
