"""`baton generate` and `baton chat`: answers in the terminal or for a pipe."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TextIO, cast

import typer
from typer import Argument, Option

from baton import Answer, BatonError, Client, InvalidRequest, Message, Stream
from baton.cli.terminal import Address, note, option, print_error, print_json, with_flags
from baton.connection import DEFAULT_ADDRESS
from baton.request_builder import GenerateOptions

System = Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")]

SAMPLING = {
    "model": option(str, "Name of a model or an adapter; required if several are served."),
    "max_tokens": option(int, "Maximum tokens. (default: the model's, or what fits)", min=1),
    "temperature": option(float, "0 takes the likeliest token. (default: the model's, or 0)"),
    "top_k": option(int, "Sample from the k likeliest tokens.", min=0),
    "top_p": option(float, "Sample from the likeliest tokens up to this probability."),
    "min_p": option(float, "Sample from tokens this likely, relative to the likeliest."),
    "repetition_penalty": option(float, "Above 1 avoids tokens of the prompt and the answer."),
    "seed": option(int, "The same seed gives the same answer. (default: random)", min=0),
}
GENERATION = SAMPLING | {
    "presence_penalty": option(float, "Above 0 avoids tokens of the answer."),
    "frequency_penalty": option(float, "Above 0 avoids tokens by their count in the answer."),
    "stop": option(list[str], "Text that ends the answer. Repeatable.", metavar="TEXT"),
    "timeout": option(float, "Give up after this long.", metavar="SECONDS"),
}

_CHAT_HELP = """\
/help         this text
/reset        forget the conversation, keep the system message
/system TEXT  set the system message; without TEXT, remove it
/exit         leave, as Ctrl-D does
Ctrl-C        stop the current answer"""


class Playback:
    """An answer as it arrives, with its times. `text` is kept after a failure."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._start = time.perf_counter()
        self.text = ""
        self.ttft_seconds = 0.0
        self.total_seconds = 0.0

    def read(self, write: Callable[[str], None] = lambda text: None) -> Answer:
        for delta in self._stream:
            self.ttft_seconds = self.ttft_seconds or time.perf_counter() - self._start
            self.text += delta.text
            write(delta.text)
        self.total_seconds = time.perf_counter() - self._start
        return self._stream.answer

    def print(self) -> None:
        """Prints each delta at once, and ends the last line."""
        try:
            self.read(_write)
        finally:
            if self.text and not self.text.endswith("\n"):
                _write("\n")

    def note_summary(self) -> None:
        """Prints the tokens' count and rate if stderr is a terminal."""
        if not sys.stderr.isatty():
            return
        count = self._stream.answer.usage.completion_tokens
        seconds = self.total_seconds - self.ttft_seconds
        # The first token belongs to prefill; the rate is that of the others.
        rate = f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds > 0 else ""
        note(f"{count} tokens{rate}, first after {self.ttft_seconds * 1000:.0f} ms")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@with_flags(GENERATION)
def generate(
    prompt: str | None = Argument(None, help="The prompt; - or none reads it from stdin."),
    raw: bool = Option(False, "--raw", help="Continue the prompt as plain text."),
    system: System = None,
    n: int = Option(1, "--n", min=1, help="Number of answers."),
    *,
    ignore_eos: bool = Option(False, "--ignore-eos", help="Continue past the model's end tokens."),
    as_json: bool = Option(False, "--json", help="Print one JSON object at the end."),
    address: Address = DEFAULT_ADDRESS,
    **options: Any,
) -> None:
    """Answer one prompt.

    The prompt is a user's message if the model has a chat template, else plain text to continue.
    Only the answer goes to stdout; several are printed when all are complete, each under a line
    with its number.
    """
    wanted = cast(GenerateOptions, options | {"n": n, "ignore_eos": ignore_eos})
    show = _show_json if as_json else _show_text if n == 1 else _show_all
    with (
        Client(address) as client,
        _start(client, _read_prompt(prompt), raw, system, wanted) as stream,
    ):
        show(Playback(stream))


def _read_prompt(argument: str | None) -> str:
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or pipe one in", param_hint="PROMPT")
    if argument is None or argument == "-":
        return _piped().read().removesuffix("\n")
    return argument


def _piped() -> TextIO:
    """Standard input as UTF-8 in any locale. A request with other text is refused later."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin


def _start(
    client: Client, prompt: str, raw: bool, system: str | None, wanted: GenerateOptions
) -> Stream:
    asked = wanted.get("model")
    models = [model for model in client.models() if asked in (None, model.name)]
    if not raw and any(model.has_chat_template for model in models):
        opening = [] if system is None else [Message("system", system)]
        return client.stream_chat([*opening, Message("user", prompt)], **wanted)
    if system is not None:
        raise typer.BadParameter("needs a chat, but this is plain text", param_hint="--system")
    return client.stream(prompt, **wanted)


def _show_text(playback: Playback) -> None:
    playback.print()
    playback.note_summary()


def _show_all(playback: Playback) -> None:
    for choice in playback.read().choices:
        typer.echo(f"--- {choice.index} ---")
        typer.echo(choice.text.removesuffix("\n"))
    playback.note_summary()


def _show_json(playback: Playback) -> None:
    fields = dataclasses.asdict(playback.read()) | {
        "ttft_seconds": round(playback.ttft_seconds, 6),
        "total_seconds": round(playback.total_seconds, 6),
    }
    print_json(fields, in_a_line=True)


@with_flags(SAMPLING)
def chat(system: System = None, *, address: Address = DEFAULT_ADDRESS, **options: Any) -> None:
    """Talk to the model. /help lists the commands of a conversation."""
    with Client(address) as client:
        names = [model.name for model in client.models() if model.has_chat_template]
        if not names:
            raise InvalidRequest("the model has no chat template; use `baton generate --raw`")
        if sys.stdin.isatty():
            note(f"{options['model'] or names[0]} at {address}; /help for help, Ctrl-D to leave")
        Conversation(client, system or "", cast(GenerateOptions, options)).run()


class Conversation:
    """The messages so far, and the system message above them."""

    def __init__(self, client: Client, system: str, wanted: GenerateOptions) -> None:
        self._client = client
        self._system = system
        self._wanted = wanted
        self._history: list[Message] = []

    def run(self) -> None:
        interactive = sys.stdin.isatty()
        for line in _typed_lines() if interactive else map(str.strip, _piped()):
            command, _, text = line.partition(" ")
            match command:
                case "/exit" if not text:
                    return
                case "/help":
                    note(_CHAT_HELP)
                case "/reset":
                    self._history.clear()
                case "/system":
                    self._system = text.strip()
                case _ if command.startswith("/"):
                    print_error(f"there is no {command}; /help lists the commands")
                case _ if line:
                    self._answer(line, interactive)

    def _answer(self, text: str, interactive: bool) -> None:
        """Prints the answer. Ctrl-C cuts it short; the part received is kept."""
        question = Message("user", text)
        opening = [Message("system", self._system)] if self._system else []
        messages = [*opening, *self._history, question]
        try:
            with self._client.stream_chat(messages, **self._wanted) as stream:
                playback = Playback(stream)
                with contextlib.suppress(KeyboardInterrupt):
                    playback.print()
        except BatonError as error:
            if not interactive:
                raise
            print_error(error.message)
            return
        if playback.text:
            self._history += [question, Message("assistant", playback.text)]


def _typed_lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` line editing and history)
    while True:
        try:
            line = input("> ")
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
            continue
        yield line.strip()
