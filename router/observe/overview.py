"""What operators see of a router, over gRPC and HTTP."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.errors import PermissionDenied, UnknownRequest
from baton.core.types import Role
from baton.router.edges.auth import Caller
from baton.router.observe.diagnosis import diagnose
from baton.router.observe.time_breakdown import request_timing
from baton.router.observe.trends import BUCKET_SECONDS
from baton.router.requests.serving import Activity
from baton.router.served_models import ServedModel, ServedModels
from baton.router.workers.link import WorkerLink
from baton.v1 import cluster_pb2 as pb
from baton.v1 import timing_pb2

RECENT_REQUESTS = 50
_FAULT = "it cannot be used; `baton status` with an admin's key says why"


@dataclass(frozen=True, slots=True)
class RouterOverview:
    models: ServedModels
    activity: Activity
    router_id: str
    queue_limit: int
    began: float = field(default_factory=time.monotonic)

    def status(self, caller: Caller) -> pb.StatusResponse:
        """Returns the status of the models that the caller may use."""
        return self._status(self._shown(caller)) if caller.admin else self.public_status(caller)

    def public_status(self, caller: Caller) -> pb.StatusResponse:
        """Returns the status without addresses and fault details, which only admins see."""
        status = self._status(self._shown(caller))
        for worker in status.workers:
            worker.member.address = ""
            worker.fault = _FAULT if worker.fault or worker.load.fault else ""
            worker.load.fault = ""
        return status

    def _status(self, models: Sequence[ServedModel]) -> pb.StatusResponse:
        waiting: Counter[int] = Counter()
        for model in models:
            waiting.update(model.serving.admission.priorities)
        return pb.StatusResponse(
            router_id=self.router_id,
            uptime_seconds=time.monotonic() - self.began,
            model=models[0].name if models else "",
            active_requests=self.activity.active,
            finished_requests=self.activity.finished,
            queued_requests=sum(model.serving.admission.queued for model in models),
            queue_limit=self.queue_limit,
            draining=self.activity.draining,
            queued_priorities=[
                pb.QueuedPriority(priority=priority, requests=requests)
                for priority, requests in sorted(waiting.items())
            ],
            workers=[status for model in models for status in _workers(model)],
            models=map(_model_status, models),
        )

    def pools(self, pools: pb.PoolsResponse, caller: Caller) -> pb.PoolsResponse:
        """Restricts the controller's answer to the models that the caller may use."""
        if caller.admin or not caller.key.models:
            return pools
        shown = {model.name for model in self._shown(caller)}
        models = [each for each in pools.models if each.model in shown]
        return pb.PoolsResponse(
            prefill=sum(each.prefill for each in models),
            decode=sum(each.decode for each in models),
            workers=[each for each in pools.workers if each.model in shown],
            models=models,
        )

    def metrics_addresses(self) -> list[str]:
        """Lists the workers' metrics addresses."""
        links = (link for model in self.models for link in model.membership.links)
        addresses = (link.welcome.metrics_address for link in links if link.welcome)
        return sorted(filter(None, addresses))

    def diagnosis(self, name: str, caller: Caller) -> pb.Diagnosis:
        model = self.model(name, caller)
        found = diagnose(
            model.serving.trends.traffic(),
            _pool_load(list(model.membership.usable(Role.PREFILL))),
            _pool_load(list(model.membership.usable(Role.DECODE))),
            model.serving.admission.queued,
        )
        found.model = model.name
        return found

    def _shown(self, caller: Caller) -> list[ServedModel]:
        """Returns the models of which the caller may use the base or an adapter; all for an
        admin."""
        may_use = caller.key.may_use
        return [each for each in self.models if caller.admin or any(map(may_use, each.names))]

    def model(self, name: str, caller: Caller) -> ServedModel:
        """Returns the model of that name; for an empty name, the busiest. Raises if the caller may
        not see it."""
        shown = self._shown(caller)
        if found := [model for model in shown if model.name == name]:
            return found[0]
        if name:
            caller.check_model(name)
        if name or not list(self.models):
            return self.models.named(name, caller.key.may_use)
        if not shown:
            raise PermissionDenied("this API key may use none of the models here", field="model")
        return max(shown, key=lambda model: model.serving.trends.traffic().answers)

    def timing(self, request_id: str, caller: Caller) -> timing_pb2.RequestTiming:
        """Returns the time breakdown of one of the caller's requests; of any for an admin."""
        owner = None if caller.admin else caller.key.name
        ledger = self.activity.ledgers.find(request_id, owner)
        if ledger is None:
            raise UnknownRequest(
                f"no request called {request_id!r} is among the latest here", field="request_id"
            )
        return request_timing(ledger)

    def recent(self, limit: int = 0) -> list[timing_pb2.RequestTiming]:
        """Returns the latest requests, newest first, without their phases."""
        ledgers = self.activity.ledgers.recent(limit or RECENT_REQUESTS)
        return [request_timing(ledger, phases=False) for ledger in ledgers]

    def trends(self, name: str, caller: Caller) -> pb.TrendsResponse:
        points = [
            pb.TrendPoint(
                answers=bucket.sums.answers,
                prompt_tokens=bucket.sums.prompt_tokens,
                output_tokens=bucket.sums.output_tokens,
                ttft=bucket.ttft.spread(),
                itl=bucket.itl.spread(),
            )
            for bucket in self.model(name, caller).serving.trends.series()
        ]
        return pb.TrendsResponse(seconds_each=BUCKET_SECONDS, points=points)


def _model_status(model: ServedModel) -> pb.ModelStatus:
    serving = model.serving
    return pb.ModelStatus(
        name=model.name,
        active_requests=serving.active,
        queued_requests=serving.admission.queued,
        ready=serving.placer.can_place,
    )


def _workers(model: ServedModel) -> list[pb.WorkerStatus]:
    links = model.membership.links
    agents = {link.agent: link.worker_id for link in links if link.welcome}
    return [_worker_status(link, agents, model) for link in links]


def _worker_status(link: WorkerLink, agents: dict[str, str], model: ServedModel) -> pb.WorkerStatus:
    welcome, membership = link.welcome, model.membership
    member = pb.Member(worker_id=link.worker_id, address=link.address, model=model.name)
    if welcome:
        member.role = welcome.role
    return pb.WorkerStatus(
        member=member,
        attached=welcome is not None,
        total_pages=link.total_pages,
        load=link.load,
        active_requests=link.active,
        connected=sorted(name for agent, name in agents.items() if link.peers.reaches(agent)),
        fault=membership.fault(link),
        draining=link.draining or link.leaving,
        known_pages=len(link.cache),
        prompt_tokens=link.assigned.prompt_tokens,
        cached_tokens=link.assigned.cached_tokens,
        busy_share=link.busy.share,
        incarnation=welcome.incarnation if welcome else 0,
        misfits=[
            pb.Misfit(worker_id=name, reason=reason)
            for name, reason in membership.pairs.misfits(link)
        ],
        quantization=welcome.quantization if welcome else "",
        kv_dtype=welcome.kv_dtype if welcome else "",
    )


def _pool_load(links: Sequence[WorkerLink]) -> pb.PoolLoad:
    loads = [link.load for link in links]
    total = sum(link.total_pages for link in links)
    free = sum(load.free_pages for load in loads)
    return pb.PoolLoad(
        workers=len(links),
        busy_share=sum(link.busy.share for link in links) / max(len(links), 1),
        waiting=sum(load.waiting for load in loads),
        running=sum(load.running for load in loads),
        queued_tokens=sum(load.queued_tokens for load in loads),
        free_share=free / total if total else 0.0,
        transfers=sum(load.transfers for load in loads),
        guessed_tokens=sum(load.guessed_tokens for load in loads),
        accepted_tokens=sum(load.accepted_tokens for load in loads),
        guessed_steps=sum(load.guessed_steps for load in loads),
    )
