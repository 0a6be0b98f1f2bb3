"""The options that several commands share, each described once."""

from __future__ import annotations

from typing import Annotated

import typer

Address = Annotated[str, typer.Option(metavar="HOST:PORT", help="The router to talk to.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="A system message to start with.")]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="The most tokens to write. (default: what fits)")
]
Temperature = Annotated[
    float | None, typer.Option(help="0 takes the likeliest token each time. (default: 0)")
]
TopK = Annotated[int | None, typer.Option(min=0, help="Draw from the k likeliest tokens.")]
TopP = Annotated[
    float | None, typer.Option(help="Draw from the likeliest tokens, up to this probability.")
]
MinP = Annotated[
    float | None, typer.Option(help="Draw from tokens at least this likely, against the likeliest.")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1 avoids tokens of the prompt and the answer.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Above 0 avoids tokens that are in the answer.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Above 0 avoids tokens, the more the more often they came.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="The same seed gives the same answer. (default: fresh)")
]
