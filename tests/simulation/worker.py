"""One simulated process of a worker: the real role and the real transfer thread's work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from baton.core.config import Config
from baton.core.types import AttemptKey, Role
from baton.core.wire import role_to
from baton.decode_worker.decode_phase import DecodePhase
from baton.engine.engine import Engine
from baton.engine.page_pool import PagePool
from baton.kv_transfer.pool_layout import HeadRange, cache_root
from baton.kv_transfer.shard_process import ShardProxy
from baton.kv_transfer.sharded_transport import ShardedTransport
from baton.kv_transfer.transfer_events import Fetched, PagesDamaged, TransferEvent
from baton.kv_transfer.transfer_thread import TransferThread
from baton.kv_transfer.transport import PoolMemory
from baton.prefill_worker.prefill_phase import PrefillPhase
from baton.v1 import worker_pb2 as pb
from baton.v1.transfer_pb2 import PoolLayout
from baton.worker.engine_thread import Detached, FromRouter
from baton.worker.metrics import WorkerMetrics
from baton.worker.outbox import Outbox
from baton.worker.step_record import StepRecord, judge

from .engine import DeviceLost, SimulatedEngine, SimulatedSpeculation, Windows
from .fabric import CELL_BYTES, HEADS, Fabric, SimulatedTransport, Write
from .shard import RankLost, SimulatedShard
from .streams import Stream
from .tier import add_second_tier
from .world import Violation, World

LEASE_SECONDS = 1.0
LINGER_SECONDS = 30.0
LAYOUT = PoolLayout(version=1, model="simulated")
SPLIT_LAYOUT = PoolLayout(
    version=1, model="simulated", layers=1, page_size=1, kv_heads=HEADS, head_dim=1
)
"""Of pages of four cells: keys and values, two heads each."""


class QuietMetrics(WorkerMetrics):
    """Counts guesses, and measures nothing else."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def guessed(self, tokens: int, accepted: int) -> None:
        self._counts["guesses accepted"] += accepted
        self._counts["guesses rejected"] += tokens - accepted

    def damaged(self, pages: int) -> None:
        pass

    def queued(self, seconds: float) -> None:
        pass

    def step(self, requests: int, tokens: int, seconds: float) -> None:
        pass

    def transferred(self, count: int, seconds: float) -> None:
        pass

    def fetched(self, pages: int, seconds: float) -> None:
        pass

    def fetch_failed(self, seconds: float) -> None:
        pass

    def load(self, load: pb.Load) -> None:
        pass

    def cache(self, pool: PagePool) -> None:
        pass


class SimulatedOutbox(Outbox):
    """Hands messages to the streams of one worker."""

    def __init__(self, streams: dict[int, Stream]) -> None:
        self._streams = streams

    def send(self, attachment: int, message: pb.WorkerMessage) -> None:
        stream = self._streams.get(attachment)
        if stream is not None:
            stream.to_router(message)

    def broadcast(self, message: pb.WorkerMessage) -> None:
        for attachment in list(self._streams):
            self.send(attachment, message)

    def flush(self) -> None:
        pass


class SimulatedWorker:
    """Runs the engine's and the transfer's turns, each when it has something to do."""

    def __init__(
        self,
        world: World,
        fabric: Fabric,
        worker_id: str,
        kind: Role,
        config: Config,
        *,
        pages: int,
        digests: bool,
        incarnation: int,
        second_tier: bool = False,
        shards: int = 0,
        windows: Windows = (None,),
        verdicts: Sequence[pb.Verdict] = (),
    ) -> None:
        """With `shards`, the heads of its pages are split among so many processes. `verdicts` are
        those on the processes before it."""
        self.world = world
        self.worker_id = worker_id
        self.kind = kind
        self.dead = False
        self.frozen = False
        self.crashed = False
        self.judged = True  # a request loses it, and learns how it ended
        self.record = StepRecord()
        self.record.verdicts.extend(verdicts)
        self.streams: dict[int, Stream] = {}
        self._engine_due = self._transfer_due = False
        # As on a CPU with digests, or as on a GPU without.
        self.engine = SimulatedEngine(
            pages,
            config.page_size,
            salt=incarnation * 10**6,
            runs_ahead=not digests,
            windows=windows,
        )
        if config.prefix_cache:
            self.engine.pool.root = cache_root(LAYOUT)
        if second_tier:
            add_second_tier(
                self.engine.pool, self.engine.memory, world, self._is_postponed, self._poke_engine
            )
        agent = f"{worker_id}.{incarnation}"
        self.transports = [
            SimulatedTransport(fabric, agent + f"/{rank}" * (rank > 0), self.engine.memory, heads)
            for rank, heads in enumerate(_split(shards))
        ]
        for transport in self.transports:
            transport.poke = self._poke_transfer
        self.transport = self.transports[0]
        self.sharded = self._shard(shards) if shards else None
        self.on_crash: Callable[[], None] = lambda: None
        memory = PoolMemory(0, CELL_BYTES * len(self.transport.cells), pages, "cpu")
        digest = self.sharded.digests if self.sharded else self._digests
        self.transfer = TransferThread(
            self.sharded or self.transport,
            memory,
            SPLIT_LAYOUT if shards else LAYOUT,
            self._on_transfer,
            digest=digest if digests else None,
            lease_seconds=LEASE_SECONDS,
            linger_seconds=LINGER_SECONDS,
            clock=world.clock,
        )
        self.transfer.open()
        self._config = config
        self._windows = windows
        self._becomes: Role | None = None  # once nothing of its role is left
        self.role = self._make_role()
        self._inbox: list[FromRouter | Detached | TransferEvent] = []
        self._tick_at = float("inf")
        self._postponed: list[Callable[[], None]] = []

    @property
    def agent(self) -> str:
        return self.transport.agent

    def _shard(self, shards: int) -> ShardedTransport:
        own, *others = (
            SimulatedShard(transport, heads)
            for transport, heads in zip(self.transports, _split(shards), strict=True)
        )
        return ShardedTransport(
            self.transport,
            HeadRange(0, HEADS // shards),
            cast(list[ShardProxy], others),
            digest=own.digest,
            clock=self.world.clock,
        )

    def push_of(self, write: Write) -> AttemptKey:
        """The push that a write on its way belongs to."""
        number = write.number
        if self.sharded:
            number = self.sharded._parts.get(number, number)
        return self.transfer._transfers._writes[number]

    def welcome(self) -> pb.Welcome:
        return pb.Welcome(
            worker_id=self.worker_id,
            incarnation=self.record.incarnation,
            verdicts=self.record.verdicts,
            role=role_to(self.kind),
            pool=self.transfer.pool_address,
            total_pages=self.engine.pool.total,
        )

    def _make_role(self) -> PrefillPhase | DecodePhase:
        make = PrefillPhase if self.kind is Role.PREFILL else DecodePhase
        role = make(
            cast(Engine, self.engine),
            self.transfer,
            SimulatedOutbox(self.streams),
            QuietMetrics(self.world.counts),
            self._config,
            self.record,
        )
        if isinstance(role, DecodePhase) and self._config.speculation != "off":
            role._scheduler._speculation = SimulatedSpeculation(self._windows)
        return role

    @property
    def verdict(self) -> pb.Verdict:
        """On this process, once it has ended."""
        return judge(self.record.memory, "", -1)

    # What reaches the process.

    def attach(self, stream: Stream) -> None:
        self.streams[stream.attachment] = stream
        stream.to_router(pb.WorkerMessage(welcome=self.welcome()))

    def on_message(self, stream: Stream, message: pb.RouterMessage) -> None:
        self._put(FromRouter(stream.attachment, message))

    def on_detach(self, stream: Stream) -> None:
        if self.streams.pop(stream.attachment, None):
            self._put(Detached(stream.attachment))

    def _on_transfer(self, event: TransferEvent) -> None:
        self.world.log(self.agent, event)
        if isinstance(event, PagesDamaged):
            self.world.counts["damaged pages"] += event.count
        if isinstance(event, Fetched):
            self.world.counts["pages fetched"] += event.pages
        self._put(event)

    def _put(self, item: FromRouter | Detached | TransferEvent) -> None:
        if not self.dead:
            self._inbox.append(item)
            self._poke_engine()

    # Faults.

    def kill(self) -> None:
        self.dead = True
        for stream in list(self.streams.values()):
            stream.cut("its process died")

    def freeze(self) -> None:
        self.frozen = True
        for transport in self.transports:
            transport.stalled = True

    def thaw(self) -> None:
        self.frozen = False
        for transport in self.transports:
            transport.stalled = False
        postponed, self._postponed = self._postponed, []
        for turn in postponed:
            turn()

    def drain(self) -> None:
        """Takes nothing new, and a little later hands back what runs."""
        self._order(self.role.drain)
        role = self.role
        self.world.after(1.0, lambda: self._order(role.hand_back))

    def switch(self) -> None:
        """Drains, and takes up the other role; or goes on as it was when transfers do not end."""
        if self._becomes is not None:
            return
        self._becomes = Role.DECODE if self.kind is Role.PREFILL else Role.PREFILL
        self.drain()
        self.world.after(6.0, lambda: self._order(self._stay))

    def _stay(self) -> None:
        if self._becomes is not None:
            self._becomes = None
            self.role.resume()

    def _become(self, kind: Role) -> None:
        self.world.log(self.agent, f"is a {kind} worker now")
        self.world.counts["changes of role"] += 1
        self.kind, self._becomes = kind, None
        self.role = self._make_role()
        switched = pb.RoleSwitched(welcome=self.welcome())
        for stream in self.streams.values():
            stream.to_router(pb.WorkerMessage(role_switched=switched))

    def _order(self, order: Callable[[], None]) -> None:
        if not self.dead and not self._is_postponed(lambda: self._order(order)):
            order()
            self._poke_engine()

    # Turns.

    def _poke_engine(self) -> None:
        if not self._engine_due:
            self._engine_due = True
            self.world.after(self.world.random.random() * 0.01, self._engine_turn)

    def _poke_transfer(self) -> None:
        if not self._transfer_due:
            self._transfer_due = True
            self.world.after(self.world.random.random() * 0.002, self._transfer_turn)

    def _engine_turn(self) -> None:
        if self.dead or self._is_postponed(self._engine_turn):
            return
        self._engine_due = False
        inbox, self._inbox = self._inbox, []
        for item in inbox:
            if isinstance(item, FromRouter):
                self.role.on_message(item.attachment, item.message, item.arrived)
            elif isinstance(item, Detached):
                self.role.on_detach(item.attachment)
            else:
                self.role.on_transfer(item)
        try:
            busy = self.role.step()
        except DeviceLost as error:
            self.crashed = True
            self.record.crash(error)
            self.on_crash()
            return
        if busy:
            self._poke_engine()
        if self._becomes and self.role.settled:
            self._become(self._becomes)
        if fault := self.role.load().fault:
            self._check_fault(fault)
        self._poke_transfer()

    def _check_fault(self, fault: str) -> None:
        if "quarantine" not in fault:
            raise Violation(f"{self.agent} reports: {fault}")
        self.world.counts["turns over the quarantine budget"] += 1

    def _transfer_turn(self) -> None:
        if self.dead or self._is_postponed(self._transfer_turn):
            return
        self._transfer_due = False
        try:
            self.transfer.step(0.0)
        except RankLost:
            self.on_crash()
        else:
            self._schedule_tick()

    def _schedule_tick(self) -> None:
        deadline = self.transfer.deadline
        if deadline < self._tick_at:
            self._tick_at = deadline
            self.world.after(max(deadline - self.world.now, 0.0), self._tick)

    def _tick(self) -> None:
        self._tick_at = float("inf")
        self._poke_transfer()

    def _is_postponed(self, turn: Callable[[], None]) -> bool:
        if self.frozen:
            self._postponed.append(turn)
        return self.frozen

    def _digests(self, _peer: str, pages: Sequence[int]) -> list[int]:
        return [_digest(self.engine.memory[page]) for page in pages]


def _split(shards: int) -> list[HeadRange | None]:
    if not shards:
        return [None]
    return [HeadRange(rank * HEADS // shards, HEADS // shards) for rank in range(shards)]


def _digest(page: list[int]) -> int:
    return sum(cell * (place + 3) for place, cell in enumerate(page)) % 4_294_967_291
