"""A host that belongs to no cluster tries the ports of Ray's and Baton's processes:
python stranger_at_ray.py ADDRESS…

Prints, as JSON, what each answers: by method over gRPC, without and with Ray's token, which is in
RAY_AUTH_TOKEN; and the status of an HTTP GET. Methods that a port does not serve are left out.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import urllib.error
import urllib.request
from typing import TypedDict

import grpc

# One of each service, which takes an empty request.
METHODS = (
    "ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "ray.rpc.NodeManagerService/GetNodeStats",
    "ray.rpc.ObjectManagerService/Pull",
    "ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "ray.rpc.ReporterService/HealthCheck",
    "ray.rpc.events.EventAggregatorService/AddEvents",
    "baton.v1.Control/Pools",
    "baton.v1.Membership/Report",
)
NOT_SERVED = ("UNIMPLEMENTED", "UNAVAILABLE")
SECONDS = 20.0


def call(address: str, method: str, token: str) -> str:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address) as channel:
        try:
            ask = channel.unary_unary(f"/{method}", bytes, bytes)
            ask(b"", timeout=SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def get(address: str) -> int:
    """The status; 0 where nothing speaks HTTP."""
    try:
        with urllib.request.urlopen(f"http://{address}/", timeout=SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return 0


class Tried(TypedDict):
    grpc: dict[str, str]
    with_token: dict[str, str]
    http: int


def tried(address: str) -> Tried:
    token = os.environ["RAY_AUTH_TOKEN"]
    found = {
        method: answer
        for method in METHODS
        if (answer := call(address, method, "")) not in NOT_SERVED
    }
    with_token = {method: call(address, method, token) for method in found}
    return {"grpc": found, "with_token": with_token, "http": get(address)}


if __name__ == "__main__":
    print(json.dumps({address: tried(address) for address in sys.argv[1:]}))
