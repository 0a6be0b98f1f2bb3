"""`baton generate`: one prompt, one answer or several."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import typer

from baton import Client, Message, Stream
from baton.cli import options
from baton.cli.edge import edge, note
from baton.cli.playback import Playback
from baton.cli.terminal import print_json
from baton.connection import DEFAULT_ADDRESS
from baton.request_builder import GenerateOptions


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; - or nothing reads it from stdin.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text.")] = False,
    system: options.System = None,
    n: Annotated[int, typer.Option("--n", min=1, help="How many answers to write.")] = 1,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Ends the answer. Repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end tokens.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Give up after this long.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end.")
    ] = False,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Answer one prompt.

    The prompt is a user's message when the model has a chat template, and plain text to
    continue otherwise. Only the answer goes to stdout; several come when all are written, each
    under a line with its number.
    """
    wanted = GenerateOptions(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        timeout=timeout,
    )
    show = _show_json if as_json else _show_text if n == 1 else _show_all
    with (
        edge(),
        Client(address) as client,
        _start(client, _read_prompt(prompt), raw, system, wanted) as stream,
    ):
        show(stream)


def _read_prompt(argument: str | None) -> str:
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
    if argument is None or argument == "-":
        return sys.stdin.read().removesuffix("\n")
    return argument


def _start(
    client: Client, prompt: str, raw: bool, system: str | None, wanted: GenerateOptions
) -> Stream:
    as_chat = not raw and any(model.has_chat_template for model in client.models())
    if as_chat:
        opening = [] if system is None else [Message("system", system)]
        return client.stream_chat([*opening, Message("user", prompt)], **wanted)
    if system is not None:
        raise typer.BadParameter("needs a chat, and this is plain text", param_hint="--system")
    return client.stream(prompt, **wanted)


def _show_text(stream: Stream) -> None:
    playback = Playback(stream)
    playback.print()
    if sys.stderr.isatty():
        note(playback.summary())


def _show_all(stream: Stream) -> None:
    playback = Playback(stream)
    for choice in playback.read().choices:
        typer.echo(f"--- {choice.index} ---")
        typer.echo(choice.text.removesuffix("\n"))
    if sys.stderr.isatty():
        note(playback.summary())


def _show_json(stream: Stream) -> None:
    playback = Playback(stream)
    answer = playback.read()
    fields = dataclasses.asdict(answer) | {
        "ttft_seconds": round(playback.ttft_seconds, 6),
        "total_seconds": round(playback.total_seconds, 6),
    }
    print_json(fields, in_a_line=True)
