"""The wanted workers by name, their pending role switches, and what processes report. No I/O.

    wanted ─scaled down─▶ retiring ─drained─▶ forgotten
       └─drained by an operator─▲

A pool's wanted number is the count of its wanted workers, so nothing can disagree with it: a
worker that switches its role changes both pools' numbers, and one that an operator drains is no
longer wanted. Names are never reused.
"""

from __future__ import annotations

import json
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
"""Ended processes that routers are notified of."""

SILENT_SECONDS = 10.0
"""A member that has not reported for this long does not count as serving."""

SILENT = "silent: lost, frozen, or waiting for a place"
"""Progress of such a member."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """A value: each method returns another one."""

    workers: Mapping[str, Role]
    retiring: frozenset[str] = frozenset()  # workers that drain and are no longer wanted
    named: Pools = NONE  # names given so far, of each role
    models: Mapping[str, str] = field(default_factory=dict)  # the model of each worker

    @property
    def wanted(self) -> Pools:
        """The wanted workers of all models."""
        return self._count(self.workers)

    def wanted_of(self, model: str) -> Pools:
        return self._count(self.of_model(model))

    def of_model(self, model: str) -> list[str]:
        return [name for name in self.workers if self.models[name] == model]

    def _count(self, names: Iterable[str]) -> Pools:
        count = Counter(self.workers[name] for name in names if name not in self.retiring)
        return Pools(count[Role.PREFILL], count[Role.DECODE])

    def scaled(self, wanted: Pools, spare: Sequence[str] = (), model: str = "") -> Fleet:
        """With `wanted` workers of a model. Where there are too many, the first in `spare`
        retire."""
        fleet, now = self, self.wanted_of(model)
        for role in (Role.PREFILL, Role.DECODE):
            fleet = fleet._grown(role, wanted.of(role) - now.of(role), model)
            fleet = fleet._shrunk(role, now.of(role) - wanted.of(role), spare, model)
        return fleet

    def switched(self, name: str, role: Role) -> Fleet:
        """The worker has switched its role."""
        return replace(self, workers={**self.workers, name: role})

    def of_models(self, first: str) -> Fleet:
        """Assigns workers without a model to `first`."""
        return replace(self, models={name: each or first for name, each in self.models.items()})

    def retired(self, name: str) -> Fleet:
        """The worker drains and is no longer wanted."""
        return replace(self, retiring=self.retiring | {name})

    def without(self, name: str) -> Fleet:
        """The worker has ended, and must not come back."""
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
        going = [name for name in able if name not in self.retiring][: max(0, count)]
        return replace(self, retiring=self.retiring.union(going))


def dump(fleet: Fleet) -> str:
    """The text that `parse` reads."""
    return json.dumps(asdict(fleet) | {"retiring": sorted(fleet.retiring)})


def parse(text: str | bytes) -> Fleet:
    tree = json.loads(text)
    workers = {name: Role(role) for name, role in tree["workers"].items()}
    # Versions with one model name none.
    models = tree.get("models") or dict.fromkeys(workers, "")
    return Fleet(workers, frozenset(tree["retiring"]), Pools(*tree["named"]), models)


class RoleSwitches:
    """The workers that are about to switch their roles.

        begun ─the worker reports its new role, or has ended─▶ over
          └────neither within `seconds`──────────────────────▶ over: it keeps its role

    The controller permits every switch, so that two routers which are asked at the same moment
    cannot take the last two workers of a role.
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """`seconds` is the time limit for draining and switching."""
        self._seconds = seconds
        self._clock = clock
        self._pending: dict[str, tuple[Role, float]] = {}  # new role, and deadline

    def begin(self, name: str, role: Role) -> None:
        self._pending[name] = role, self._clock() + self._seconds

    def names(self, fleet: Fleet) -> set[str]:
        """The workers of the fleet that have not switched yet."""
        now = self._clock()
        self._pending = {
            name: (role, deadline)
            for name, (role, deadline) in self._pending.items()
            if fleet.workers.get(name) is other(role) and now < deadline
        }
        return set(self._pending)

    def expected(self, fleet: Fleet, model: str = "") -> Pools:
        """The wanted workers of each pool of a model, with pending switches counted as done."""
        wanted = fleet.wanted_of(model)
        for name in (self.names(fleet) - fleet.retiring) & set(fleet.of_model(model)):
            role, _ = self._pending[name]
            wanted = wanted.with_more(role, 1).with_more(other(role), -1)
        return wanted


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster, and how far it has started."""

    worker_id: str
    role: Role | None  # None for a router
    host: str  # to listen on; empty means its node's address
    progress: str = "starting"
    address: str = ""  # "host:port" while it serves
    http: str = ""  # a router's address for HTTP, if it serves that
    metrics: str = ""  # a router's address for metrics
    error: str = ""  # why it cannot start
    pid: int = 0  # another one after a restart
    started: str = ""  # in how many seconds, and what took them
    agent: str = ""  # a serving worker's transport agent, another one after a restart
    requests: int = 0  # a worker's, running or waiting
    incarnation: int = 0  # a worker's process, as in its Welcome
    node: str = ""  # Ray's name of the node
    verdicts: tuple[Verdict, ...] = ()  # on other processes of workers on its node


def router_name(index: int) -> str:
    return f"router-{index}"


def is_router(actor: str) -> bool:
    return actor.startswith("router-")


def is_worker(actor: str) -> bool:
    return actor.startswith(tuple(f"{role.value}-" for role in Role))


class MemberTable:
    """The latest report of every member.

    A member that served and is silent is lost, frozen, or waits for a place to restart. Routers
    keep it, since they check themselves whether it answers; operators and scaling see it as not
    serving.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported_at: dict[str, float] = {}
        self.latest: dict[str, Member] = {}

    def report(self, member: Member) -> Member | None:
        """Returns the member's report before this one."""
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
        return self._clock() - self._reported_at[name] <= SILENT_SECONDS


class EndedProcesses:
    """What is known of the latest processes of workers that have ended."""

    def __init__(self) -> None:
        self.agents: deque[str] = deque(maxlen=REMEMBERED_PROCESSES)
        self.verdicts: deque[Verdict] = deque(maxlen=REMEMBERED_PROCESSES)
        # The last reports of processes whose workers are on another node now.
        self._left: deque[Member] = deque(maxlen=REMEMBERED_PROCESSES)

    def note_report(self, before: Member, now: Member) -> None:
        """A worker's report, and the one before it."""
        if before.agent not in ("", now.agent):
            self.agents.append(before.agent)
        if before.node != now.node:
            self._left.append(before)

    def judge(self, verdicts: Iterable[Verdict]) -> None:
        """The first verdict on a process stands."""
        judged = {each.incarnation for each in self.verdicts}
        self.verdicts.extend(each for each in verdicts if each.incarnation not in judged)

    def note_lost_nodes(self, nodes: Set[str], members: Iterable[Member]) -> None:
        """Nobody reads the records there, so no request is convicted or acquitted."""
        self.judge(
            Verdict(incarnation=each.incarnation, ended="its node is gone", crashed=True)
            for each in (*self._left, *members)
            if each.node in nodes
        )
