"""What a link keeps about its worker beside its health: connections, requests, cache hits."""

from __future__ import annotations

from baton.core.errors import LayoutMismatch
from baton.router.placement.placement import Suspicion
from baton.v1 import worker_pb2 as pb


class Peers:
    """For a prefill worker: the decode agents it was asked to connect to, and its answers."""

    def __init__(self) -> None:
        self._asked: set[str] = set()
        self._answers: dict[str, pb.Connected] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def ask(self, agent: str) -> bool:
        """Returns whether the worker is to be asked: it was not yet."""
        if agent in self._asked:
            return False
        self._asked.add(agent)
        return True

    def answer(self, connected: pb.Connected) -> None:
        self._answers[connected.agent] = connected

    def forget(self, agent: str) -> None:
        self._asked.discard(agent)
        self._answers.pop(agent, None)

    def reaches(self, agent: str) -> bool:
        """Whether the worker can push to a decode worker's agent."""
        answer = self._answers.get(agent)
        return answer is not None and not answer.error and not answer.lost

    def mismatch(self, agent: str) -> str:
        """Why the worker will never push there; empty when it may."""
        answer = self._answers.get(agent)
        return answer.error if answer and answer.reason == LayoutMismatch.reason else ""


class AssignedRequests:
    """This router's requests on a worker, as admission counts them."""

    def __init__(self, backlog: int) -> None:
        self._backlog = backlog
        self._unanswered = 0  # neither begun nor with reserved pages
        self._alone = 0  # suspects that tolerate no other
        self.suspects = 0  # requests that lost a worker before

    def count_unanswered(self, change: int) -> None:
        self._unanswered += change

    def count_suspect(self, suspicion: Suspicion, change: int) -> None:
        self.suspects += change * (suspicion is not Suspicion.NONE)
        self._alone += change * (suspicion is Suspicion.ALONE)

    def admits(self, suspicion: Suspicion) -> bool:
        if suspicion is Suspicion.ALONE and self.suspects:
            return False
        if suspicion is Suspicion.SUSPECT and self._alone:
            return False
        return self._unanswered < self._backlog


class PrefixHits:
    """Prompt tokens that a worker prefilled for this router, and those of them it had cached."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def add(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
