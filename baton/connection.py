"""What both clients hold about a connection: where, with which options, when it is ready."""

from __future__ import annotations

from baton.v1 import cluster_pb2, worker_pb2
from core.types import MAX_MESSAGE_BYTES

DEFAULT_ADDRESS = "127.0.0.1:50051"

CALL_SECONDS = 30.0
"""The default timeout of every call that does not generate."""

POLL_SECONDS = 0.2
"""Between two looks at a cluster that is not ready."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A router that froze or was cut off says nothing: find out by asking.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # A router that restarts is found again soon; gRPC's default grows to 2 minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def why_not_ready(status: cluster_pb2.StatusResponse) -> str:
    """Empty when some prefill worker can push to some decode worker; else what is missing."""
    usable = [worker for worker in status.workers if worker.attached and not worker.fault]
    prefill = [worker for worker in usable if worker.member.role == worker_pb2.ROLE_PREFILL]
    decode = {w.member.worker_id for w in usable if w.member.role == worker_pb2.ROLE_DECODE}
    if not prefill:
        return "the router has no prefill worker"
    if not decode:
        return "the router has no decode worker"
    if not any(decode.intersection(worker.connected) for worker in prefill):
        return "no prefill worker is connected to a decode worker"
    return ""
