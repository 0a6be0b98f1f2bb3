"""A real gRPC server that plays a router from a script."""

# The services' methods are named in the proto.

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures

import grpc

from baton.core.errors import BatonError
from baton.core.types import Role
from baton.core.wire import role_to
from baton.rpc import to_status
from baton.v1 import cluster_pb2, inference_pb2, worker_pb2
from baton.v1.cluster_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from baton.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

SERVER_OPTIONS = [("grpc.max_receive_message_length", 64 << 20)]


class ScriptedRouter(InferenceServicer, AdminServicer):
    """Answers every request with `pieces`, one token each, and remembers what it was asked.

    Several answers to a request are all the same.
    """

    def __init__(self, port: int = 0) -> None:
        self.pieces = ["Once", " upon", " a time"]
        self.error: BatonError | None = None  # raised after the pieces
        self.hang = False  # wait for the client to disconnect after the pieces
        self.unfinished = False  # end the stream without Finished
        self.has_chat_template = True
        self.status = cluster_status()
        self.drained: list[str] = []  # workers to drain
        self.scaled: list[tuple[int, int]] = []  # requested pool sizes
        # Pool states or errors, one per call.
        self.pools: list[cluster_pb2.PoolsResponse | BatonError] = [cluster_pb2.PoolsResponse()]
        self.plan = cluster_pb2.PlanResponse()
        self.switched: list[tuple[str, int]] = []  # workers to switch
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.over = threading.Event()  # set when a Generate call has ended
        self._server = grpc.server(futures.ThreadPoolExecutor(4), options=SERVER_OPTIONS)
        add_InferenceServicer_to_server(self, self._server)
        add_AdminServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def stop(self) -> None:
        self.over.set()
        self._server.stop(None).wait()

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        context.add_callback(self.over.set)
        yield inference_pb2.GenerateResponse(started=started(request))
        answers = range(request.n or 1)
        for number, piece in enumerate(self.pieces):
            for index in answers:
                delta = inference_pb2.Delta(text=piece, token_ids=[number], index=index)
                yield inference_pb2.GenerateResponse(delta=delta)
        if self.hang:
            self.over.wait(20)
        if self.error is not None:
            context.abort_with_status(to_status(self.error))
        for index in answers if not self.unfinished else ():
            last = finished(len(self.pieces), index, (started(request).seed + index) % 2**64)
            yield inference_pb2.GenerateResponse(finished=last)

    def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        model = inference_pb2.Model(name="tale", has_chat_template=self.has_chat_template)
        return inference_pb2.ListModelsResponse(models=[model])

    def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        rendered = "".join(f"<{m.role}>{m.content}" for m in request.chat.messages)
        codes = [ord(character) for character in rendered or request.text]
        return inference_pb2.TokenizeResponse(token_ids=codes, rendered=rendered)

    def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def Status(
        self, request: cluster_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.StatusResponse:
        return self.status

    def Drain(
        self, request: cluster_pb2.DrainRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.DrainResponse:
        self.drained.append(request.worker_id)
        if request.restart:
            for worker in self.status.workers:
                worker.incarnation += worker.member.worker_id == request.worker_id
        return cluster_pb2.DrainResponse()

    def AddModel(
        self, request: cluster_pb2.NamedModel, context: grpc.ServicerContext
    ) -> cluster_pb2.AddModelResponse:
        return cluster_pb2.AddModelResponse()

    def Scale(
        self, request: cluster_pb2.ScaleRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.PoolsResponse:
        self.scaled.append((request.prefill, request.decode))
        return self._told(self.pools[0], context)

    def Pools(
        self, request: cluster_pb2.PoolsRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.PoolsResponse:
        now = self.pools.pop(0) if len(self.pools) > 1 else self.pools[0]
        return self._told(now, context)

    def _told(
        self, pools: cluster_pb2.PoolsResponse | BatonError, context: grpc.ServicerContext
    ) -> cluster_pb2.PoolsResponse:
        if isinstance(pools, BatonError):
            context.abort_with_status(to_status(pools))
        assert isinstance(pools, cluster_pb2.PoolsResponse)
        return pools

    def Plan(
        self, request: cluster_pb2.PlanRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.PlanResponse:
        return self.plan

    def SwitchRole(
        self, request: cluster_pb2.SwitchRoleRequest, context: grpc.ServicerContext
    ) -> cluster_pb2.SwitchRoleResponse:
        self.switched.append((request.worker_id, request.role))
        return cluster_pb2.SwitchRoleResponse(drain_seconds=1.5, switch_seconds=0.0625)


def started(request: inference_pb2.GenerateRequest) -> inference_pb2.Started:
    return inference_pb2.Started(
        request_id=request.request_id or "request-1",
        model="tale",
        prompt_tokens=4,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        seed=request.sampling.seed or 7,
        n=request.n or 1,
    )


def finished(tokens: int, index: int, seed: int) -> inference_pb2.Finished:
    usage = inference_pb2.Usage(prompt_tokens=4, completion_tokens=tokens, cached_tokens=2)
    return inference_pb2.Finished(
        finish_reason=inference_pb2.FINISH_REASON_STOP,
        usage=usage,
        stop="\n\n",
        placements=[
            inference_pb2.Placement(
                prefill_worker="prefill-0",
                decode_worker="decode-0",
                policy="split",
                reason="least loaded",
                reason_code="least_loaded",
                predicted_seconds=0.5,
            )
        ],
        index=index,
        seed=seed,
    )


def pools(
    *, wanted: tuple[int, int] = (1, 2), model: str = "tale", removed: bool = False, **progress: str
) -> cluster_pb2.PoolsResponse:
    """The given workers are up. By default one prefill and two decode workers are wanted."""
    workers = [
        cluster_pb2.PooledWorker(
            worker_id=name.replace("_", "-"),
            role=role_to(Role(name.partition("_")[0])),
            progress=words,
            ready=words == "ready",
            retiring=words == "draining",
            model=model,
        )
        for name, words in progress.items()
    ]
    prefill, decode = wanted
    own = cluster_pb2.ModelPools(model=model, prefill=prefill, decode=decode, removed=removed)
    return cluster_pb2.PoolsResponse(prefill=prefill, decode=decode, workers=workers, models=[own])


def cluster_status() -> cluster_pb2.StatusResponse:
    """One prefill worker, connected to one decode worker."""
    load = worker_pb2.Load(
        free_pages=8, leased_pages=6, quarantined_pages=2, cached_pages=3, waiting=1, running=4
    )
    prefill = cluster_pb2.Member(
        worker_id="prefill-0", role=worker_pb2.ROLE_PREFILL, address="127.0.0.1:6001"
    )
    decode = cluster_pb2.Member(
        worker_id="decode-0", role=worker_pb2.ROLE_DECODE, address="127.0.0.1:6002"
    )
    return cluster_pb2.StatusResponse(
        router_id="router-0",
        uptime_seconds=3723.0,
        model="tale",
        active_requests=4,
        finished_requests=1234,
        queued_requests=1,
        queue_limit=512,
        workers=[
            cluster_pb2.WorkerStatus(
                member=prefill,
                attached=True,
                total_pages=16,
                load=worker_pb2.Load(free_pages=16),
                connected=["decode-0"],
            ),
            cluster_pb2.WorkerStatus(
                member=decode,
                attached=True,
                total_pages=16,
                load=load,
                active_requests=4,
                prompt_tokens=200,
                cached_tokens=150,
            ),
        ],
    )
