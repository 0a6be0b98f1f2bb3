"""`baton`: every command, registered.

A command's module imports at its top what is quick to import; torch, ray and
transformers only inside the command that needs them.
"""

from __future__ import annotations

import typer

from baton.cli.bench import bench
from baton.cli.certs import certs
from baton.cli.chat import chat
from baton.cli.diagnose import diagnose
from baton.cli.doctor import doctor
from baton.cli.drain import drain
from baton.cli.generate import generate
from baton.cli.keys import keys
from baton.cli.leave import leave
from baton.cli.model import model
from baton.cli.plan import plan
from baton.cli.restart import restart
from baton.cli.role import role
from baton.cli.scale import scale
from baton.cli.serve import serve
from baton.cli.simulate import simulate
from baton.cli.status import status
from baton.cli.stop import stop
from baton.cli.top import top
from baton.cli.why import why

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
