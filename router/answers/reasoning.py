"""Parts what a model thinks from what it says.

A model that thinks writes <think>, its thoughts, </think>, and then its answer.
Some templates write the first of these marks themselves. White space around the
marks belongs to neither part.
"""

from __future__ import annotations

from enum import Enum, auto

from baton.router.answers.parts import Parts, held_back

OPENER, CLOSER = "<think>", "</think>"


class _State(Enum):
    UNDECIDED = auto()  # nothing but white space so far
    THINKING = auto()
    PAUSING = auto()  # between thoughts and answer
    ANSWERING = auto()


class ReasoningSplitter:
    def __init__(self, *, opened: bool) -> None:
        """`opened` when the prompt ends within the thoughts."""
        self._state = _State.THINKING if opened else _State.UNDECIDED
        self._held = ""
        self._begun = False  # a thought has been told

    def push(self, text: str) -> Parts:
        self._held += text
        parts = Parts()
        while True:
            before = self._state
            parts += self._step()
            if self._state is before:
                return parts

    def flush(self) -> Parts:
        held, self._held = self._held, ""
        if self._state is _State.THINKING:
            return Parts(reasoning=held.rstrip())
        if self._state is _State.PAUSING:
            return Parts()
        return Parts(held)

    def _step(self) -> Parts:
        match self._state:
            case _State.UNDECIDED:
                return self._decide()
            case _State.THINKING:
                return self._think()
            case _State.PAUSING:
                self._held = self._held.lstrip()
                if self._held:
                    self._state = _State.ANSWERING
                return Parts()
            case _State.ANSWERING:
                held, self._held = self._held, ""
                return Parts(held)

    def _decide(self) -> Parts:
        begun = self._held.lstrip()
        if begun.startswith(OPENER):
            self._state, self._held = _State.THINKING, begun[len(OPENER) :]
        elif not OPENER.startswith(begun):
            self._state = _State.ANSWERING
        return Parts()

    def _think(self) -> Parts:
        thought, mark, rest = self._held.partition(CLOSER)
        if mark:
            self._state, self._held = _State.PAUSING, rest
            return self._thought(thought.rstrip())
        kept = len(thought) - held_back(thought, [CLOSER])
        kept = len(thought[:kept].rstrip())
        self._held = thought[kept:]
        return self._thought(thought[:kept])

    def _thought(self, text: str) -> Parts:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return Parts(reasoning=text)
