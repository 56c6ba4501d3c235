"""The command line: `mx-driving check`, `mx-driving demo`, ... The package itself does not import this."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from .. import __version__, _backends
from .._cli_support.problems import in_a_sentence
from .bench import bench
from .check import check
from .demo import demo
from .fuse import fuse
from .models import models
from .record import AS_GIVEN, record
from .replay import replay
from .verify import verify

app = typer.Typer(name="mx-driving", no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")


def _say_version(wanted: bool) -> None:
    if wanted:
        kernels = "reference" if _backends.native.why_not() else _backends.native.isa()
        print(f"mx-driving {__version__}, torch {torch.__version__}, {kernels}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print versions and instruction set.")
    ] = False,
) -> None:
    """The deformable sampling operators of mx_driving: check them on this machine, see them at work, measure them, judge
    recorded calls."""


app.command()(check)
app.command()(demo)
app.command()(bench)
app.command()(models)
app.command(context_settings=AS_GIVEN)(record)
app.command()(replay)
app.command()(fuse)
app.command()(verify)


def main() -> None:
    with in_a_sentence("mx-driving"):
        app(prog_name="mx-driving")
