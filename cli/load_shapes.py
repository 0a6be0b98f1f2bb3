"""How long prompts and answers are, and when requests come: drawn from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from baton.core.errors import InvalidRequest

LENGTHS_HELP = "N, LOW..HIGH (uniform), normal:MEAN:DEVIATION or lognormal:MEDIAN:SIGMA"

# Each is one token in the vocabularies of the usual models.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work number night"
    " point home water room mother area money story fact month lot right study book eye job word"
    " business issue side kind head house service friend father power hour game line end law car"
    " city name team minute idea body back parent face level office door health person art war"
)
_WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of numbers of tokens."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        try:
            return cls._parse(text)
        except ValueError:
            raise InvalidRequest(f"{text!r} is no length; write {LENGTHS_HELP}") from None

    @classmethod
    def _parse(cls, text: str) -> Lengths:
        low, dots, high = text.partition("..")
        if dots:
            return cls("uniform", _positive(low), _positive(high))
        kind, colon, rest = text.partition(":")
        if not colon:
            return cls("fixed", _positive(text))
        if kind not in ("normal", "lognormal"):
            raise ValueError(kind)
        first, second = rest.split(":")
        return cls(kind, _positive(first), _positive(second))

    def draw(self, source: random.Random) -> int:
        match self.kind:
            case "uniform":
                drawn = source.uniform(self.first, self.second)
            case "normal":
                drawn = source.gauss(self.first, self.second)
            case "lognormal":
                drawn = source.lognormvariate(math.log(self.first), self.second)
            case _:
                drawn = self.first
        return max(1, round(drawn))


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise ValueError(text)
    return value


@dataclass(frozen=True, slots=True)
class Load:
    """One request to be sent."""

    prompt: str
    output_tokens: int
    # After the start of the run; 0 where requests are sent as others end.
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What a run asks, the same for the same seed."""

    requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_tokens: int = 0  # that all prompts begin with
    rate: float = 0.0  # requests a second; 0 sends the next when one has ended
    poisson: bool = True
    seed: int = 0

    def loads(self) -> list[Load]:
        source = random.Random(self.seed)
        shared = _text(source, self.shared_tokens)
        made, at = [], 0.0
        for _ in range(self.requests):
            own = max(1, self.prompt_tokens.draw(source) - self.shared_tokens)
            prompt = " ".join(filter(None, (shared, _text(source, own))))
            made.append(Load(prompt, self.output_tokens.draw(source), at))
            if self.rate:
                at += source.expovariate(self.rate) if self.poisson else 1 / self.rate
        return made


def _text(source: random.Random, tokens: int) -> str:
    return " ".join(source.choice(_WORDS) for _ in range(tokens))
