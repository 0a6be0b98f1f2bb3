"""A router's state of one worker, from the messages of its link: whether it is lost, how busy it
is, which workers it reaches, and which requests it has. No I/O."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from baton.core.errors import LayoutMismatch
from baton.router.placement.placement import Suspicion
from baton.v1 import worker_pb2 as pb

BUSY_WINDOW_SECONDS = 10.0
REPORT_SPACING_SECONDS = 0.5
"""Shortest time between two kept reports."""


class Heartbeat:
    """Decides whether a worker is lost.

    The router pings every worker periodically; the worker's event loop answers even while its
    engine computes. A worker is lost when it is

    - frozen: nothing came for several pings: a stopped process, a hung event loop, a lost host;
    - stalled: it answers pings, but its engine has work and has not reported for much longer
      than any step takes.

    Both are counted in pings, not in seconds: after a router was itself stopped, its clock is far
    ahead and the workers' answers are still unread.
    """

    def __init__(self, ping_seconds: float, frozen_seconds: float, stall_seconds: float) -> None:
        self._ping_seconds = ping_seconds
        self._frozen_seconds = frozen_seconds
        self._stall_seconds = stall_seconds
        self._silent_pings = 0
        self._stalled_pings = 0

    @property
    def is_frozen(self) -> bool:
        return self._silent_pings * self._ping_seconds > self._frozen_seconds

    @property
    def is_stalled(self) -> bool:
        stalled = self._stalled_pings * self._ping_seconds > self._stall_seconds
        return stalled and not self.is_frozen

    def message_received(self) -> None:
        self._silent_pings = 0

    def engine_reported(self) -> None:
        self._stalled_pings = 0

    def next_ping(self, *, busy: bool) -> str:
        """Counts a ping; `busy` says that the engine has work. Returns why the worker is lost, or
        ""."""
        self._silent_pings += 1
        self._stalled_pings = self._stalled_pings + 1 if busy else 0
        if self.is_frozen:
            return f"it has not answered for {self._frozen_seconds:g} seconds"
        if self.is_stalled:
            return f"its engine has not reported for {self._stall_seconds:g} seconds"
        return ""


class PingFence:
    """Closed after another worker was lost, until this one has answered a newer ping.

        open ─another worker is lost─▶ closed ─answer to a ping sent since─▶ open

    When a host is lost with all its workers, a router notices one after the other. A request that
    lost a worker there must not be sent to the next dead one and end up as a poison request.
    """

    def __init__(self) -> None:
        self._pings = 0
        self._answers = 0  # answers come in the order of the pings
        self._awaited = 0  # answers needed to open the fence

    @property
    def is_open(self) -> bool:
        return self._answers >= self._awaited

    def ping_sent(self) -> None:
        self._pings += 1

    def close(self) -> None:
        """Closes the fence until the latest ping is answered."""
        self._awaited = self._pings

    def answer_received(self) -> bool:
        """Counts an answer. Returns True if it opened the fence."""
        before = self.is_open
        self._answers += 1
        return self.is_open and not before


class BusyShare:
    """The share of the last seconds in which a worker's engine computed.

    Reports have the worker's clock, so only differences between reports are used.
    """

    def __init__(self) -> None:
        self._reports: deque[tuple[float, float]] = deque()  # up and busy seconds

    def report(self, up_seconds: float, busy_seconds: float) -> None:
        reports = self._reports
        if len(reports) > 1 and up_seconds - reports[-2][0] < REPORT_SPACING_SECONDS:
            reports.pop()
        reports.append((up_seconds, busy_seconds))
        while up_seconds - reports[0][0] > BUSY_WINDOW_SECONDS and len(reports) > 2:
            reports.popleft()

    @property
    def share(self) -> float:
        """0 to 1; 0 before the second report."""
        if len(self._reports) < 2:
            return 0.0
        (began, busy_before), (ended, busy_after) = self._reports[0], self._reports[-1]
        if ended <= began:
            return 0.0
        return min(max((busy_after - busy_before) / (ended - began), 0.0), 1.0)


class StepStretch(NamedTuple):
    """Consecutive steps of one worker."""

    steps: int
    seconds: float  # mean of a step
    busy_prefill: float  # mean number of prefill workers that computed meanwhile


class StepPace:
    """Measures a decode worker's steps from its messages.

    A worker sends a router one message for each step with any of the router's requests. Two
    messages that begin with the same request are of consecutive steps: the oldest request comes
    first and gets a token in every step, unless it pauses.
    """

    def __init__(self) -> None:
        self._oldest = ""
        self._at = 0.0
        self._seconds = 0.0  # since the last `drain`
        self._steps = 0
        self._drained_at = 0.0
        self._busy_seconds = 0.0  # of prefill workers, until the last `drain`

    def step(self, step: pb.Step, now: float) -> None:
        if not step.tokens:
            return
        oldest = step.tokens[0].request_id
        if oldest == self._oldest:
            self._seconds += now - self._at
            self._steps += 1
        self._oldest, self._at = oldest, now

    def interrupt(self) -> None:
        """Notes that requests have paused: the next step does not follow the last one."""
        self._oldest = ""

    def drain(self, prefill_busy_seconds: float, now: float) -> StepStretch | None:
        """Returns the steps since the last call, or None. `prefill_busy_seconds` is the busy time
        of all prefill workers so far."""
        busy, seconds = prefill_busy_seconds - self._busy_seconds, now - self._drained_at
        self._busy_seconds, self._drained_at = prefill_busy_seconds, now
        if not self._steps or seconds <= 0:
            return None
        stretch = StepStretch(self._steps, self._seconds / self._steps, max(0.0, busy) / seconds)
        self._seconds, self._steps = 0.0, 0
        return stretch


class Peers:
    """The decode agents that a prefill worker was asked to connect to, and its answers."""

    def __init__(self) -> None:
        self._answers: dict[str, pb.Connected | None] = {}  # None until it answers

    def ask(self, agent: str) -> bool:
        """Returns True the first time, when the worker must be asked."""
        new = agent not in self._answers
        self._answers.setdefault(agent, None)
        return new

    def answer(self, connected: pb.Connected) -> None:
        self._answers[connected.agent] = connected

    def forget(self, agent: str) -> None:
        self._answers.pop(agent, None)

    def reaches(self, agent: str) -> bool:
        """True if the worker can push to a decode worker's agent."""
        answer = self._answers.get(agent)
        return answer is not None and not answer.error and not answer.lost

    def mismatch(self, agent: str) -> str:
        """Returns why the worker can never push there; "" if it may."""
        answer = self._answers.get(agent)
        return answer.error if answer and answer.reason == LayoutMismatch.reason else ""


INPUTS_PER_REQUEST = 32
"""Inputs of the embedding model that count as one request in a worker's backlog: a step takes many
of them, and they need no pages."""


class AssignedRequests:
    """Counts this router's requests on a worker."""

    def __init__(self, backlog: int) -> None:
        self._backlog = backlog
        self.unanswered = 0  # requests that are neither begun nor have reserved pages
        self._inputs = 0  # inputs of the embedding model among these
        self._alone = 0  # suspects that run without another suspect
        self.suspects = 0  # requests that lost a worker before
        self.live = 0  # attempts of live requests
        self.prompt_tokens = 0  # so far
        self.cached_tokens = 0  # prompt tokens that the worker had cached
        self.adapters: Counter[bytes] = Counter()  # requests by adapter digest

    def count_adapter(self, digest: bytes, change: int) -> None:
        self.adapters[digest] += change
        if not self.adapters[digest]:
            del self.adapters[digest]

    def count_unanswered(self, change: int, *, encoded: bool = False) -> None:
        self.unanswered += change
        self._inputs += change * encoded

    def count_suspect(self, suspicion: Suspicion, change: int) -> None:
        self.suspects += change * (suspicion is not Suspicion.NONE)
        self._alone += change * (suspicion is Suspicion.ALONE)

    def count_prompt(self, tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens += tokens
        self.cached_tokens += cached_tokens

    def admits(self, suspicion: Suspicion) -> bool:
        if suspicion is Suspicion.ALONE and self.suspects:
            return False
        if suspicion is Suspicion.SUSPECT and self._alone:
            return False
        return self.unanswered - self._inputs + self._inputs // INPUTS_PER_REQUEST < self._backlog
