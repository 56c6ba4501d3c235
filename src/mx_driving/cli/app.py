"""The command line: `mx-driving check`, `mx-driving bench`, ... `import mx_driving` does not import this module."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from typer.core import TyperCommand, TyperGroup

from mx_driving_portable.record import main as record_calls

from .. import __version__, _backends
from .bench import bench
from .check import check
from .forms import forms
from .fuse import fuse
from .info import info
from .replay import replay
from .start import start
from .verify import verify


class _HidesTypesOfFlags:
    """Hide the type of a flag in the help, because `--quick <bool>` looks as if the flag took a value."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_HidesTypesOfFlags, TyperCommand): ...


class Group(_HidesTypesOfFlags, TyperGroup): ...


app = typer.Typer(name="mx-driving", cls=Group, add_completion=False, rich_markup_mode="markdown")


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print versions and instruction set.")] = False,
) -> None:
    """The deformable sampling operators of mx_driving: check them on this machine, measure them, judge recorded calls,
    list what `patch` knows, fuse and verify ONNX files."""
    if version:
        kernels = "reference" if _backends.native.why_not() else _backends.native.isa()
        print(f"mx-driving {__version__}, torch {torch.__version__}, {kernels}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help(), end="")
        raise typer.Exit(2)


_AS_GIVEN = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


def record(context: typer.Context) -> None:  # mx_driving_portable/record.py has the options and the help
    """Run a program, and record its calls of sampling operators for `mx-driving replay`."""
    record_calls("mx-driving", context.args)


app.command(cls=Command)(info)
app.command(cls=Command)(check)
app.command(cls=Command)(bench)
app.command(cls=Command, context_settings=_AS_GIVEN)(record)
app.command(cls=Command)(replay)
app.command(cls=Command)(forms)
app.command(cls=Command)(fuse)
app.command(cls=Command)(verify)


def main() -> None:
    start("mx-driving", app)
