"""The command line: `mx-driving check`, `mx-driving demo`. Nothing here is imported by the package itself."""

from __future__ import annotations

import typer

from .bench import bench
from .check import check
from .demo import demo
from .models import models

app = typer.Typer(
    name="mx-driving",
    help="The deformable sampling operators of mx_driving: check them on this machine, see them at work, measure them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)
app.command()(check)
app.command()(demo)
app.command()(bench)
app.command()(models)


def main() -> None:
    app(prog_name="mx-driving")
