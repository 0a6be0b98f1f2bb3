"""`baton chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import typer

from baton import BatonError, Client, InvalidRequest, Message
from baton.cli import options
from baton.cli.edge import complain, edge, note
from baton.cli.playback import Playback
from baton.connection import DEFAULT_ADDRESS
from baton.request_builder import GenerateOptions

_HELP = """\
/help         this text
/reset        forget the conversation, keep the system message
/system TEXT  set the system message; without TEXT, remove it
/exit         leave, as Ctrl-D does
Ctrl-C        stop the current answer"""


class Conversation:
    """What was said so far, and the system message above it."""

    def __init__(self, client: Client, system: str, wanted: GenerateOptions) -> None:
        self._client = client
        self._wanted = wanted
        self._history: list[Message] = []
        self.system = system

    def reset(self) -> None:
        """Forgets what was said."""
        self._history.clear()

    def ask(self, text: str) -> None:
        """Writes the answer to `text`. Ctrl-C cuts it short; what has come of it counts."""
        question = Message("user", text)
        with self._client.stream_chat(self._messages(question), **self._wanted) as stream:
            playback = Playback(stream)
            with contextlib.suppress(KeyboardInterrupt):
                playback.print()
        if playback.text:
            self._history += [question, Message("assistant", playback.text)]

    def _messages(self, question: Message) -> list[Message]:
        opening = [Message("system", self.system)] if self.system else []
        return [*opening, *self._history, question]


def chat(
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    address: options.Address = DEFAULT_ADDRESS,
) -> None:
    """Talk to the model. /help lists what else can be typed."""
    wanted = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    with edge(), Client(address) as client:
        model = _chat_model(client)
        if sys.stdin.isatty():
            note(f"{model} at {address}; /help for help, Ctrl-D to leave")
        _converse(Conversation(client, system or "", wanted))


def _chat_model(client: Client) -> str:
    """The name of the model that will answer."""
    names = [model.name for model in client.models() if model.has_chat_template]
    if not names:
        raise InvalidRequest("the model has no chat template; use `baton generate --raw`")
    return names[0]


def _converse(conversation: Conversation) -> None:
    interactive = sys.stdin.isatty()
    for line in _typed_lines() if interactive else _piped_lines():
        if line == "/exit":
            return
        if line.startswith("/"):
            _command(conversation, line)
        elif line:
            _ask(conversation, line, interactive)


def _ask(conversation: Conversation, line: str, interactive: bool) -> None:
    try:
        conversation.ask(line)
    except BatonError as error:
        if not interactive:
            raise
        complain(error.message)


def _command(conversation: Conversation, line: str) -> None:
    name, _, text = line.partition(" ")
    match name:
        case "/help":
            note(_HELP)
        case "/reset":
            conversation.reset()
        case "/system":
            conversation.system = text.strip()
        case _:
            complain(f"there is no {name}; /help lists what there is")


def _piped_lines() -> Iterator[str]:
    for line in sys.stdin:
        yield line.strip()


def _typed_lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` its line editing and history)
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
