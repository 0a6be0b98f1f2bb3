"""`baton`: every command, registered.

A command's module imports torch, ray, transformers and httpx only inside the command that needs
them, so that other commands start quickly.
"""

from __future__ import annotations

import typer

from baton.cli.ask import chat, generate
from baton.cli.batch_command import batch
from baton.cli.cache_commands import cache
from baton.cli.credentials import certs, keys
from baton.cli.doctor import doctor
from baton.cli.fleet_commands import drain, leave, plan, restart, role, scale, stop
from baton.cli.load_test import bench
from baton.cli.model_commands import adapter, model
from baton.cli.monitor import diagnose, status, top, why
from baton.cli.serve import serve
from baton.cli.simulate import simulate
from baton.cli.terminal import CommandGroup

app = typer.Typer(
    cls=CommandGroup,
    name="baton",
    help="Serve large language models from separate prefill and decode pools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    *(serve, stop, generate, chat, batch, status, top, why, diagnose, bench, doctor),
    *(drain, restart, scale, role, plan, leave, certs, simulate),
):
    app.command()(command)
app.add_typer(model, name="model")
app.add_typer(keys, name="keys")
app.add_typer(cache, name="cache")
app.add_typer(adapter, name="adapter")
