"""The wanted workers by name, their pending role switches, and what processes report. No I/O.

    wanted ─scaled down─▶ retiring ─drained─▶ forgotten
       └─drained by an operator─▲

A pool's wanted number is the count of its wanted workers and is not stored: a worker that
switches its role changes both pools' numbers, and one that an operator drains is no longer wanted.
Names are never reused.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace

from baton.core.types import Role
from baton.planner.sizing import NONE, Pools, other
from baton.v1.worker_pb2 import Verdict

CONTROLLER = "controller"
"""The controller's name in the cluster's Ray namespace."""

ROUTER = "router-0"
"""The name of the first router; see `router_name`."""

DRAINING = "draining"
"""Progress of a worker that takes nothing new, and ends with its last request."""

DRAINED = "drained"
"""Progress of a worker that has drained and ended, and must not come back."""

REMEMBERED_PROCESSES = 256
"""Ended processes that are published to routers."""

SILENT_SECONDS = 10.0
"""A member that has not reported for this long does not count as serving."""

SILENT = "silent: lost, frozen, or waiting for a place"
"""Progress of a member that has not reported for SILENT_SECONDS."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Immutable: each method returns a changed copy."""

    workers: Mapping[str, Role]
    retiring: frozenset[str] = frozenset()  # workers that drain and are no longer wanted
    named: Pools = NONE  # names given so far to workers of each role
    models: Mapping[str, str] = field(default_factory=dict)  # the model of each worker

    @property
    def wanted(self) -> Pools:
        """Counts the wanted workers of all models."""
        return self._count(self.workers)

    def wanted_of(self, model: str) -> Pools:
        return self._count(self.of_model(model))

    def of_model(self, model: str) -> list[str]:
        return [name for name in self.workers if self.models[name] == model]

    def _count(self, names: Iterable[str]) -> Pools:
        count = Counter(self.workers[name] for name in names if name not in self.retiring)
        return Pools(count[Role.PREFILL], count[Role.DECODE])

    def scaled(self, wanted: Pools, spare: Sequence[str] = (), model: str = "") -> Fleet:
        """Returns a fleet with `wanted` workers of a model. Surplus workers retire, in the order
        of `spare`."""
        fleet, now = self, self.wanted_of(model)
        for role in (Role.PREFILL, Role.DECODE):
            fleet = fleet._grown(role, wanted.of(role) - now.of(role), model)
            fleet = fleet._shrunk(role, now.of(role) - wanted.of(role), spare, model)
        return fleet

    def switched(self, name: str, role: Role) -> Fleet:
        return replace(self, workers={**self.workers, name: role})

    def with_default_model(self, model: str) -> Fleet:
        """Assigns workers without a model to `model`."""
        return replace(self, models={name: each or model for name, each in self.models.items()})

    def retired(self, name: str) -> Fleet:
        return replace(self, retiring=self.retiring | {name})

    def without(self, name: str) -> Fleet:
        workers = {other: role for other, role in self.workers.items() if other != name}
        models = {other: model for other, model in self.models.items() if other != name}
        return replace(self, workers=workers, retiring=self.retiring - {name}, models=models)

    def _grown(self, role: Role, count: int, model: str) -> Fleet:
        first = self.named.of(role)
        new = {f"{role.value}-{index}": role for index in range(first, first + count)}
        named = self.named.with_more(role, len(new))
        models = {**self.models, **dict.fromkeys(new, model)}
        return replace(self, workers={**self.workers, **new}, named=named, models=models)

    def _shrunk(self, role: Role, count: int, spare: Sequence[str], model: str) -> Fleet:
        own = set(self.of_model(model))
        able = [name for name in spare if name in own and self.workers[name] is role]
        surplus = [name for name in able if name not in self.retiring][: max(0, count)]
        return replace(self, retiring=self.retiring.union(surplus))


def dump(fleet: Fleet) -> str:
    return json.dumps(asdict(fleet) | {"retiring": sorted(fleet.retiring)})


def parse(text: str | bytes) -> Fleet:
    tree = json.loads(text)
    workers = {name: Role(role) for name, role in tree["workers"].items()}
    # Earlier versions, with one model, stored no names.
    models = tree.get("models") or dict.fromkeys(workers, "")
    return Fleet(workers, frozenset(tree["retiring"]), Pools(*tree["named"]), models)


class RoleSwitches:
    """Permitted role switches that are not complete.

        begun ─the worker reports its new role, or has ended─▶ over
          └────neither within `seconds`──────────────────────▶ over: it keeps its role

    The controller permits every switch, so two routers cannot take the last two workers of a role
    at the same moment.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """`seconds` limits draining and switching together."""
        self._seconds = seconds
        self._clock = clock
        self._pending: dict[str, tuple[Role, float]] = {}  # new role, and deadline

    def begin(self, name: str, role: Role) -> None:
        self._pending[name] = role, self._clock() + self._seconds

    def names(self, fleet: Fleet) -> set[str]:
        """Names the fleet's workers with a pending switch."""
        now = self._clock()
        self._pending = {
            name: (role, deadline)
            for name, (role, deadline) in self._pending.items()
            if fleet.workers.get(name) is other(role) and now < deadline
        }
        return set(self._pending)

    def expected(self, fleet: Fleet, model: str = "") -> Pools:
        """Counts a model's wanted workers, with pending switches as done."""
        wanted = fleet.wanted_of(model)
        for name in (self.names(fleet) - fleet.retiring) & set(fleet.of_model(model)):
            role, _ = self._pending[name]
            wanted = wanted.with_more(role, 1).with_more(other(role), -1)
        return wanted


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster and the state of its start."""

    worker_id: str
    role: Role | None  # None for a router
    host: str  # where it listens; empty means its node's address
    progress: str = "starting"
    address: str = ""  # "host:port" while it serves
    http: str = ""  # a router's address for HTTP, if it serves HTTP
    metrics: str = ""  # a router's address for metrics
    error: str = ""  # why it cannot start
    pid: int = 0  # changes with a restart
    started: str = ""  # start time in seconds, by part
    agent: str = ""  # a serving worker's transport agent; changes with a restart
    requests: int = 0  # a worker's running and waiting requests
    incarnation: int = 0  # names a worker's process, as in its Welcome
    node: str = ""  # Ray's node id
    verdicts: tuple[Verdict, ...] = ()  # on other worker processes of its node


def router_name(index: int) -> str:
    return f"router-{index}"


def is_router(actor: str) -> bool:
    return actor.startswith("router-")


def is_worker(actor: str) -> bool:
    return actor.startswith(tuple(f"{role.value}-" for role in Role))


class MemberTable:
    """The latest report of every member.

    A silent member that served before is lost, frozen or waiting to be restarted. It is still
    published to routers, which check for themselves whether it answers. For operators and scaling
    it does not serve.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported_at: dict[str, float] = {}
        self.latest: dict[str, Member] = {}

    def report(self, member: Member) -> Member | None:
        """Returns the member's previous report."""
        before = self.latest.get(member.worker_id)
        self.latest[member.worker_id] = member
        self._reported_at[member.worker_id] = self._clock()
        return before

    def forget(self, name: str) -> None:
        self.latest.pop(name, None)

    @property
    def current(self) -> list[Member]:
        """All members; silent ones have no address."""
        return [
            replace(member, progress=SILENT, address="")
            if member.address and not self.serves(name)
            else member
            for name, member in self.latest.items()
        ]

    def serves(self, name: str) -> bool:
        member = self.latest.get(name)
        if member is None or not member.address:
            return False
        return not self.is_silent(name)

    def is_silent(self, name: str) -> bool:
        return self._clock() - self._reported_at.get(name, -math.inf) > SILENT_SECONDS


class EndedProcesses:
    """Agents of worker processes that ended recently, and the verdicts on them."""

    def __init__(self) -> None:
        self.agents: deque[str] = deque(maxlen=REMEMBERED_PROCESSES)
        self.verdicts: deque[Verdict] = deque(maxlen=REMEMBERED_PROCESSES)
        # Last reports from workers that have since moved to another node.
        self._moved: deque[Member] = deque(maxlen=REMEMBERED_PROCESSES)

    def note_report(self, before: Member, now: Member) -> None:
        """Takes two successive reports of a worker."""
        if before.agent not in ("", now.agent):
            self.agents.append(before.agent)
        if before.node != now.node:
            self._moved.append(before)

    def judge(self, verdicts: Iterable[Verdict]) -> None:
        """Adds verdicts on processes that have none yet."""
        judged = {each.incarnation for each in self.verdicts}
        self.verdicts.extend(each for each in verdicts if each.incarnation not in judged)

    def note_lost_nodes(self, nodes: Set[str], members: Iterable[Member]) -> None:
        """Adds verdicts that neither convict nor acquit any request: the step records are lost
        with their nodes."""
        self.judge(
            Verdict(incarnation=each.incarnation, ended="its node is gone", crashed=True)
            for each in (*self._moved, *members)
            if each.node in nodes
        )
