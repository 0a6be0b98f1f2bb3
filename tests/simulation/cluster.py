"""One seed: a cluster, its requests, its faults (faults.py), and what must hold (checks.py)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from random import Random

from baton.core.config import Config, DecodeConfig, PrefillConfig, RouterConfig
from baton.core.types import LAST_PRIORITY, AttemptKey, Role, Sampling, Work
from baton.v1.worker_pb2 import Hold, RouterMessage, Verdict

from .checks import Checks
from .engine import VOCABULARY, Windows, reference
from .fabric import Fabric
from .faults import Faults
from .router import SimulatedRequest, SimulatedRouter
from .streams import Stream
from .worker import SimulatedWorker
from .world import World

REST_SECONDS = 400.0

WINDOWS: tuple[Windows, ...] = ((None, 3), (None, None, 5), (None, 9, 4), (6,), (None, 1))
"""Of the slices of the layers, in every third seed; in the others the layers are alike."""


class Cluster:
    """Everything that a seed decides. With `split`, workers may be several processes, each with
    some heads of every page."""

    kind_of_faults = Faults
    culprits = 0.1
    """The share of seeds with a request that crashes workers."""

    def __init__(self, seed: int, *, split: bool = False, trace: bool = False) -> None:
        self.world = World(seed, trace=trace)
        draw = self.world.random
        self.faults = draw.choice((0, 1, 1, 2, 2, 3, 4))
        self.world.bad_day = self.faults > 0
        # A decode worker that cannot reach a prefill worker learns of its death only from a
        # router, when the worker is back. So connections fail on one side, or workers stay away.
        self.may_lose_workers = draw.random() < 0.5
        self.split = split
        self.digests = draw.random() < 0.5 or split
        damage = 0.2 if self.digests and draw.random() < 0.4 else 0.0
        duplicates = draw.choice((0.02, 0.2))
        self.counts = self.world.counts
        self._checks = Checks(self)
        self.fabric = Fabric(self.world, self._checks.landing, damage, duplicates)
        self.config = Config(
            prefix_cache=seed % 2 == 1,
            speculation="ngram" if self.digests and seed % 5 < 2 else "off",
            page_size=4 if split else draw.choice((2, 3, 4)),
            router=RouterConfig(),
            prefill=PrefillConfig(chunk_tokens=draw.choice((3, 4, 8))),
            decode=DecodeConfig(
                max_batch=draw.choice((1, 2, 4)), chunk_tokens=4, ticket_seconds=30.0
            ),
        )
        self.second_tier = seed % 4 == 3
        self.pages = draw.choice((6, 7, 8, 12))
        self.windows: Windows = Random(seed).choice(WINDOWS) if seed % 3 == 0 else (None,)
        # A request that no engine can compute from some position on.
        self.breaks_at = {"r0": draw.randint(1, 12)} if self.faults and draw.random() < 0.1 else {}
        # A request that crashes every worker that computes some position.
        culprit = Random(f"culprit {seed}")
        crashes = self.faults and culprit.random() < self.culprits
        self.crashes_at = {"r0": culprit.randint(0, 12)} if crashes else {}
        self.workers: dict[str, SimulatedWorker] = {}  # by name, the process that lives
        self.processes: dict[str, SimulatedWorker] = {}  # by agent, every process there was
        self._background = Random(f"background {seed}")
        self._incarnations = itertools.count(1)
        self._attachments = itertools.count(1)
        self.routers = [
            SimulatedRouter(
                self.world, f"router{i}", self._attach, fetches=self.config.prefix_cache
            )
            for i in range(draw.choice((1, 1, 2)))
        ]
        for role in (Role.PREFILL, Role.DECODE):
            for i in range(draw.choice((1, 2))):
                self.start(f"{role.value}{i}", role)
        self._plan_requests()
        self._plan_holds()
        if self.config.prefix_cache:
            self._plan_forgetting()
        due = sorted(draw.randint(1, 150) for _ in range(self.faults))
        self._faults = self.kind_of_faults(self, due)
        self.world.after_event = self._faults.after_event

    def run(self) -> Counter[str]:
        """How the requests ended, and what else was seen. Raises Violation."""
        self.world.run(until=REST_SECONDS)
        self._checks.rest()
        self.counts["events"] += self.world.events
        return self.counts

    def _plan_requests(self) -> None:
        draw = self.world.random
        # With a cache there are more requests, and some come after others have ended.
        more, spread = (2, 0.5) if self.config.prefix_cache else (1, 0.1)
        asked: list[tuple[float, Work]] = []
        for number in range(draw.choice((1, 2, 3, 4)) * more):
            at, prompt = draw.random() * spread, self._prompt()
            if self.config.prefix_cache and asked and draw.random() < 0.5:
                before, earlier = draw.choice(asked)
                at, prompt = at + before, self._next_turn(earlier, prompt)
            asked.append((at, self._work(number, prompt)))
            request = SimulatedRequest(asked[-1][1], self.windows)
            self.world.after(at, partial(self._submit, draw.choice(self.routers), request))

    def _plan_holds(self) -> None:
        """Background requests pause for a while, whatever else there is."""
        draw = self._background
        for router in self.routers if draw.random() < 0.3 else ():
            at = draw.random()
            self.world.after(at, partial(self._hold, router, pause=True))
            self.world.after(at + draw.random() * 3, partial(self._hold, router, pause=False))

    def _hold(self, router: SimulatedRouter, *, pause: bool) -> None:
        for link in router.links.values() if not router.dead else ():
            link.send(RouterMessage(hold=Hold(pause=pause)))

    def _plan_forgetting(self) -> None:
        """Prefill loses what it has cached, now and then, and can fetch it from decode."""
        draw = self.world.random
        for _ in range(draw.choice((0, 2, 4))):
            self.world.after(draw.random() * 1.5, self._forget)

    def _forget(self) -> None:
        for worker in self.workers.values():
            if worker.kind is Role.PREFILL:
                pool = worker.engine.pool
                pool.lease([], pool.free).release()

    def _prompt(self) -> list[int]:
        draw = self.world.random
        length = draw.randint(1, min(9, self.config.page_size * self.pages - 1))
        tokens = [draw.randrange(VOCABULARY) for _ in range(length)]
        return _begun_alike(tokens) if self.config.prefix_cache else tokens

    def _work(self, number: int, prompt: list[int]) -> Work:
        most = self.pages * self.config.page_size
        prompt = prompt[: most - 1]
        return Work(
            key=AttemptKey(f"r{number}", 1),
            prompt_tokens=prompt,
            sampling=Sampling(),
            max_tokens=self.world.random.randint(1, min(6, most - len(prompt))),
            stop_token_ids=frozenset({5}),
            priority=LAST_PRIORITY if self._background.random() < 0.3 else 0,
        )

    def _submit(self, router: SimulatedRouter, request: SimulatedRequest) -> None:
        if router.dead:
            return
        router.submit(request)
        if self.faults and self.world.chance(0.15):
            self.world.after(self.world.random.random() * 0.2, lambda: router.cancel(request))

    def start(self, name: str, role: Role, verdicts: Sequence[Verdict] = ()) -> None:
        """`verdicts` are those on the processes of that name before."""
        incarnation = next(self._incarnations)
        worker = SimulatedWorker(
            *(self.world, self.fabric, name, role, self.config),
            pages=self._pages_of_pool,
            windows=self.windows,
            digests=self.digests,
            incarnation=incarnation,
            second_tier=self.second_tier,
            shards=self.world.random.choice((1, 2, 2)) if self.split else 0,
            verdicts=verdicts,
        )
        worker.on_crash = lambda: self._faults.kill(worker)
        for transport in worker.transports:
            self.processes[transport.agent] = worker
        worker.engine.breaks_at = self.breaks_at
        worker.engine.crashes_at = self.crashes_at
        self.workers[name] = worker
        for router in self.routers:
            router.watch(name)

    @property
    def _pages_of_pool(self) -> int:
        """Just enough for one sequence of `pages` pages of tokens."""
        size = self.config.page_size
        reach = (self.pages if w is None else -(-w // size) + 2 for w in self.windows)
        return sum(min(self.pages, pages) for pages in reach)

    def _next_turn(self, work: Work, prompt: list[int]) -> list[int]:
        """What a client asks that has had the answer to `work`."""
        return [*work.prompt_tokens, *reference(work, self.windows), *prompt]

    def _attach(self, router: SimulatedRouter, name: str) -> Stream | None:
        worker = self.workers.get(name)
        if worker is None or worker.frozen:
            return None
        stream = Stream(self.world, router, worker, next(self._attachments))
        worker.attach(stream)
        return stream


def _begun_alike(tokens: list[int]) -> list[int]:
    """A prompt that shares a part of random length with others, and goes on by itself."""
    differs = (place for place, token in enumerate(tokens) if token > 0.85 * VOCABULARY)
    shared = next(differs, len(tokens))
    return [place * 7 % VOCABULARY for place in range(shared)] + tokens[shared:]
