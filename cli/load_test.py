"""`baton bench`: load on a server, and its latencies.

Prompts, lengths and arrival times are drawn from a seed.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.terminal import AsJson, console, edge, note, print_json
from baton.connection import API_KEY_VARIABLE
from baton.core.errors import InvalidRequest

if TYPE_CHECKING:
    from baton.cli.load_client import Call, Target

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


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts."""

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
            own = max(1, self.prompt_tokens.draw(source) - self.shared_tokens)
            prompt = " ".join(filter(None, (shared, _text(source, own))))
            made.append(Load(prompt, self.output_tokens.draw(source), at))
            if self.rate:
                at += source.expovariate(self.rate) if self.poisson else 1 / self.rate
        return made


def _text(source: random.Random, tokens: int) -> str:
    return " ".join(source.choice(_WORDS) for _ in range(tokens))


def bench(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Any server of the OpenAI API.")
    ] = DEFAULT_URL,
    requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 100,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Closed loop: n at once, the next as one ends.")
    ] = 8,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Open loop: n a second, however long they take."),
    ] = None,
    constant: Annotated[
        bool, typer.Option("--constant", help="Open loop: even intervals instead of Poisson.")
    ] = False,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="LENGTH", help=f"Approximate: {LENGTHS_HELP}.")
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option(metavar="LENGTH", help="The same for answers.")
    ] = "64",
    shared_tokens: Annotated[int, typer.Option(min=0, help="Common prefix of all prompts.")] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option(help="Continue past end tokens; off for servers that reject unknown fields."),
    ] = True,
    slo_ttft: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Objective for the first token.")
    ] = 0.0,
    slo_tpot: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Objective for the time per token.")
    ] = 0.0,
    model: Annotated[str, typer.Option(help="(default: the server's first)")] = "",
    api_key: Annotated[
        str | None, typer.Option(help=f"(default: {API_KEY_VARIABLE})", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed sends the same requests.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw the times (needs baton-llm[plot]).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Put load on a server, and report TTFT, ITL, end-to-end times and goodput."""
    with edge():
        from baton.cli import load_client, load_report

        shape = Shape(
            requests,
            Lengths.parse(prompt_tokens),
            Lengths.parse(output_tokens),
            shared_tokens,
            rate or 0.0,
            not constant,
            seed,
        )
        key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
        base = load_client.base_url(url)
        named = model or load_client.served_model(base, key)
        target = load_client.Target(base, named, key, ignore_eos)
        calls = _run(target, shape, concurrency)
        objective = load_report.Objective(slo_ttft, slo_tpot)
        report = load_report.LoadReport.of(calls, objective)
        if plot:
            load_report.plot(calls, plot)
            note(f"drew {plot}")
        if as_json:
            print_json({"url": base, "model": named, **asdict(report)})
        else:
            console().print(load_report.render(report, objective))
    raise typer.Exit(1 if report.failed == report.requests else 0)


def _run(target: Target, shape: Shape, concurrency: int) -> list[Call]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from baton.cli.load_client import closed_loop, open_loop

    loads = shape.loads()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[summary]}"),
    )
    tokens = failed = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("answered", total=len(loads), summary="")

        def ended(call: Call) -> None:
            nonlocal tokens, failed
            tokens += call.output_tokens
            failed += bool(call.error)
            progress.update(
                task,
                advance=1,
                summary=f"{tokens:,} tokens" + (f", {failed} failed" if failed else ""),
            )

        if shape.rate:
            return asyncio.run(open_loop(target, loads, ended))
        return asyncio.run(closed_loop(target, loads, concurrency, ended))
