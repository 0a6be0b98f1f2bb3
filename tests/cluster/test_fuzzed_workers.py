"""Workers outlive whatever the type of a router's messages can hold, and hold nothing for it."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import ProcessCluster
from proto_strategies import messages
from tiny_models import TINY_MODELS, VOCABULARY, save

from baton.core.errors import from_reason
from baton.core.types import PROTOCOL
from baton.kv_transfer.transfer_protocol import seal
from baton.v1 import transfer_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb

SIZES: dict[str, object] = {
    "prefill": {"kv_memory": "1MiB", "threads": 1},
    "decode": {"kv_memory": "1MiB", "threads": 1},
}
FUZZ = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
# What has a worker end, or become another, and rightly so.
FATAL = ("hello", "drain", "switch_role")
CHANGED = [
    field.name
    for field in pb.Work.DESCRIPTOR.fields
    if not field.is_repeated and field.name not in ("request_id", "epoch")
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    folder = tmp_path_factory.mktemp("tiny")
    save(TINY_MODELS["llama"], folder)
    with ProcessCluster(folder, tmp_path_factory.mktemp("fuzzed"), tree=SIZES) as running:
        yield running


class Raw:
    """A stream to one worker, that takes anything."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._sent: queue.SimpleQueue[pb.RouterMessage | None] = queue.SimpleQueue()
        self.send(pb.RouterMessage(hello=pb.Hello(router_id="fuzz", protocol=PROTOCOL)))
        self._received = worker_pb2_grpc.WorkerStub(channel).Attach(iter(self._sent.get, None))
        self.failed: list[pb.Failed] = []
        self.welcome = self.read("welcome").welcome

    def send(self, message: pb.RouterMessage) -> None:
        self._sent.put(message)

    def read(self, kind: str) -> pb.WorkerMessage:
        for message in self._received:
            if message.HasField("failed"):
                self.failed.append(message.failed)
            if message.WhichOneof("kind") == kind:
                return message
        raise AssertionError(f"the stream ended before a {kind}")

    def close(self) -> None:
        self._sent.put(None)
        self._received.cancel()


def sound_work(request_id: str) -> pb.Work:
    return pb.Work(
        request_id=request_id,
        epoch=1,
        prompt_tokens=[token % VOCABULARY for token in range(20)],
        max_tokens=4,
        sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0),
    )


@st.composite
def almost_right(draw: st.DrawFn) -> pb.RouterMessage:
    """Work that is sound but for some fields, and what belongs to it."""
    name = draw(st.sampled_from("abc"))
    work = sound_work(name)
    changes = draw(messages(pb.Work.DESCRIPTOR))
    for name_of_field in draw(st.sets(st.sampled_from(CHANGED), max_size=2)):
        work.MergeFrom(pb.Work(**{name_of_field: getattr(changes, name_of_field)}))
    kind = draw(st.sampled_from(["prefill", "reserve", "compute", "deliver", "release"]))
    match kind:
        case "prefill":
            holder = draw(st.none() | messages(pb.Holder.DESCRIPTOR))
            receiver = draw(st.sampled_from(["", "nobody"]))
            asked = pb.Prefill(work=work, receiver=receiver, holder=holder)
            return pb.RouterMessage(prefill=asked)
        case "reserve":
            return pb.RouterMessage(reserve=pb.Reserve(work=work, sender="nobody"))
        case "compute":
            return pb.RouterMessage(compute=pb.Compute(work=work))
        case "deliver":
            body = draw(messages(transfer_pb2.TicketBody.DESCRIPTOR))
            body.request_id, body.epoch, body.agent = name, 1, "nobody"
            return pb.RouterMessage(
                deliver=pb.Deliver(request_id=name, epoch=1, ticket=body.SerializeToString())
            )
    return pb.RouterMessage(release=pb.Release(request_id=name, epoch=1))


def sealed(message: pb.RouterMessage, layout: transfer_pb2.PoolLayout) -> pb.RouterMessage:
    """A ticket's body becomes a ticket as the worker's own pool has it."""
    if message.HasField("deliver"):
        with contextlib.suppress(DecodeError):
            body = transfer_pb2.TicketBody.FromString(message.deliver.ticket)
            message.deliver.ticket = seal(body, layout)
    return message


def of_kind(field: FieldDescriptor) -> st.SearchStrategy[pb.RouterMessage]:
    return messages(field.message_type).map(lambda value: pb.RouterMessage(**{field.name: value}))


ANYTHING = st.one_of(
    [of_kind(field) for field in pb.RouterMessage.DESCRIPTOR.fields if field.name not in FATAL]
)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_outlives_whatever_a_router_sends(cluster: ProcessCluster, name: str) -> None:
    address = cluster.workers[name].wait_for(r"ready on (\S+)")
    with grpc.insecure_channel(address) as channel:

        @given(st.lists(ANYTHING | almost_right(), min_size=10, max_size=20))
        @FUZZ
        def try_it(sent: list[pb.RouterMessage]) -> None:
            router = Raw(channel)
            layout = router.welcome.pool.layout
            for message in sent:
                router.send(sealed(message, layout))
            router.send(pb.RouterMessage(ping=pb.Ping()))
            router.read("pong")
            for _ in range(2):  # the engine has gone on
                assert router.read("load").load.fault == ""
            for failed in router.failed:
                assert from_reason(failed.reason, failed.message).reason == failed.reason
            router.close()

        try_it()
    cluster.wait_idle()
    with cluster.client() as client:
        assert client.generate([3], max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_worker_outlives_bytes_that_are_no_message(cluster: ProcessCluster, name: str) -> None:
    address = cluster.workers[name].wait_for(r"ready on (\S+)")
    path = f"/{pb.DESCRIPTOR.package}.Worker/Attach"
    with grpc.insecure_channel(address) as channel:
        for content in (b"\xff\xff", b"", bytes(range(256)) * 40):
            call = channel.stream_stream(path, bytes, bytes)(iter([content]), timeout=20)
            with pytest.raises(grpc.RpcError):
                list(call)
    with cluster.client() as client:
        assert client.generate([3], max_tokens=3).usage.completion_tokens == 3
