"""`baton`: every command, registered.

A command's module imports at its top what is quick to import; torch, ray and
transformers only inside the command that needs them.
"""

from __future__ import annotations

import typer

from cli.bench import bench
from cli.certs import certs
from cli.chat import chat
from cli.diagnose import diagnose
from cli.doctor import doctor
from cli.drain import drain
from cli.generate import generate
from cli.keys import keys
from cli.leave import leave
from cli.model import model
from cli.plan import plan
from cli.restart import restart
from cli.role import role
from cli.scale import scale
from cli.serve import serve
from cli.simulate import simulate
from cli.status import status
from cli.stop import stop
from cli.top import top
from cli.why import why

app = typer.Typer(
    name="baton",
    help="Serve large language models from separate prefill and decode pools.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(stop)
app.command()(generate)
app.command()(chat)
app.command()(status)
app.command()(top)
app.command()(why)
app.command()(diagnose)
app.command()(bench)
app.command()(doctor)
app.command()(drain)
app.command()(restart)
app.command()(scale)
app.command()(role)
app.command()(plan)
app.command()(leave)
app.command()(certs)
app.command()(simulate)
app.add_typer(model, name="model")
app.add_typer(keys, name="keys")
