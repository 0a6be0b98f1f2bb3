"""`baton bench`: puts load on a server and measures its latencies.

Prompts, lengths and arrival times are drawn from a seed.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from baton.cli.terminal import AsJson, console, note, print_json, progress
from baton.connection import API_KEY_VARIABLE
from baton.core.errors import InvalidRequest

if TYPE_CHECKING:
    from baton.cli.load_run import Call, Target

DEFAULT_URL = "http://127.0.0.1:8000"
LENGTHS_HELP = "N, LOW..HIGH (uniform), normal:MEAN:DEVIATION or lognormal:MEDIAN:SIGMA"

# Each is one token in most models' vocabularies.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group"
    " country problem hand part place case week company system program question work number night"
    " point home water room mother area money story fact month lot right study book eye job word"
    " business issue side kind head house service friend father power hour game line end law car"
    " city name team minute idea body back parent face level office door health person art war"
)
_WORDS = _COMMON.split()

Lengths = Callable[[random.Random], float]
"""A distribution of token counts."""


def parse_lengths(text: str) -> Lengths:
    low, dots, high = text.partition("..")
    kind, colon, rest = text.partition(":")
    given = [low, high] if dots else rest.split(":") if colon else [text]
    try:
        match (
            "uniform" if dots else kind if colon else "fixed",
            [_positive(each) for each in given],
        ):
            case "fixed", [count]:
                return lambda source: count
            case "uniform", [least, most]:
                return lambda source: source.uniform(least, most)
            case "normal", [mean, deviation]:
                return lambda source: source.gauss(mean, deviation)
            case "lognormal", [median, sigma]:
                return lambda source: source.lognormvariate(math.log(median), sigma)
    except ValueError:
        pass
    raise InvalidRequest(f"{text!r} is not a length; write {LENGTHS_HELP}")


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise ValueError(text)
    return value


@dataclass(frozen=True, slots=True)
class Load:
    """One request to send."""

    prompt: str
    output_tokens: int
    # Seconds after the start of the run; 0 in a closed loop.
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The requests of a run, the same for the same seed."""

    requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_tokens: int = 0  # the common prefix of all prompts
    rate: float = 0.0  # requests a second; 0 is a closed loop
    poisson: bool = True
    seed: int = 0

    def loads(self) -> list[Load]:
        source = random.Random(self.seed)
        shared = _text(source, self.shared_tokens)
        made, at = [], 0.0
        for _ in range(self.requests):
            own = max(1, _count(self.prompt_tokens, source) - self.shared_tokens)
            prompt = " ".join(filter(None, (shared, _text(source, own))))
            made.append(Load(prompt, _count(self.output_tokens, source), at))
            if self.rate:
                at += source.expovariate(self.rate) if self.poisson else 1 / self.rate
        return made


def _count(lengths: Lengths, source: random.Random) -> int:
    return max(1, round(lengths(source)))


def _text(source: random.Random, tokens: int) -> str:
    return " ".join(source.choice(_WORDS) for _ in range(tokens))


def bench(
    url: str = Argument(DEFAULT_URL, metavar="URL", help="Any server of the OpenAI API."),
    requests: int = Option(100, min=1, help="Requests to send."),
    concurrency: int = Option(
        8, min=1, help="Closed loop: n at once; the next starts as one ends."
    ),
    rate: float | None = Option(
        None, min=0.001, help="Open loop: n a second, however long they take."
    ),
    constant: bool = Option(
        False, "--constant", help="Open loop: even intervals instead of Poisson."
    ),
    prompt_tokens: str = Option("128", metavar="LENGTH", help=f"Approximate: {LENGTHS_HELP}."),
    output_tokens: str = Option("64", metavar="LENGTH", help="The same for answers."),
    shared_tokens: int = Option(0, min=0, help="Common prefix of all prompts."),
    ignore_eos: bool = Option(
        True, help="Continue past end tokens; off for servers that reject unknown fields."
    ),
    slo_ttft: float = Option(
        0.0, min=0.0, metavar="SECONDS", help="Objective for the first token."
    ),
    slo_tpot: float = Option(
        0.0, min=0.0, metavar="SECONDS", help="Objective for the time per token."
    ),
    model: str = Option("", help="(default: the server's first)"),
    api_key: str | None = Option(None, help=f"(default: {API_KEY_VARIABLE})", show_default=False),
    seed: int = Option(0, min=0, help="The same seed sends the same requests."),
    plot: Path | None = Option(None, metavar="PNG", help="Draw the times (needs matplotlib)."),
    as_json: AsJson = False,
) -> None:
    """Put load on a server, and report TTFT, ITL, end-to-end times and goodput."""
    from baton.cli import load_run

    lengths = parse_lengths(prompt_tokens), parse_lengths(output_tokens)
    shape = Shape(requests, *lengths, shared_tokens, rate or 0.0, not constant, seed)
    key = given_key(api_key)
    base = load_run.base_url(url)
    if plot:
        load_run.check_plot(plot)
    named = model or load_run.served_model(base, key)
    target = load_run.Target(base, named, key, ignore_eos)
    calls, complete = _run(target, shape.loads(), requests if rate else concurrency)
    objective = load_run.Objective(slo_ttft, slo_tpot)
    report = load_run.LoadReport.of(calls, objective)
    if as_json:
        print_json({"url": base, "model": named, **asdict(report)})
    else:
        console().print(load_run.render(report, objective))
    if plot and calls:
        load_run.plot(calls, plot)
        note(f"drew {plot}")
    if not complete:
        note(f"interrupted; {requests - len(calls)} of {requests} requests are not in the report")
        raise typer.Exit(130)
    raise typer.Exit(1 if report.failed == report.requests else 0)


def given_key(option: str | None) -> str:
    """The API key of the command's option, or else of the environment."""
    return os.environ.get(API_KEY_VARIABLE, "") if option is None else option


def _run(target: Target, loads: list[Load], concurrency: int) -> tuple[list[Call], bool]:
    """Runs the load and shows its progress. Returns the calls that ended, and False if Ctrl-C ended
    the run."""
    from baton.cli.load_run import run

    calls: list[Call] = []
    tokens = failed = 0
    with progress() as shown:
        task = shown.add_task("answered", total=len(loads), summary="")

        def ended(call: Call) -> None:
            nonlocal tokens, failed
            calls.append(call)
            tokens += call.output_tokens
            failed += bool(call.error)
            summary = f"{tokens:,} tokens" + (f", {failed} failed" if failed else "")
            shown.update(task, advance=1, summary=summary)

        try:
            asyncio.run(run(target, loads, concurrency, ended))
        except KeyboardInterrupt:
            return calls, False
    return calls, True
