"""How a program starts: a wrong command line ends it with one sentence on standard error, as every failure does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from .problems import Problem, in_a_sentence

_UsageError: Any = typer.BadParameter.__base__  # typer's own, or click's with an older typer


class WrongValue(typer.BadParameter):
    """A value that an option's parser refuses. The message is the rest of a sentence that begins with the option's name."""


def start(program: str, command: typer.Typer | Callable[..., None]) -> None:
    """Run a command, or an app of several, on the arguments of this process, and exit."""
    app = command if isinstance(command, typer.Typer) else typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    if app is not command:
        app.command()(command)
    with in_a_sentence(program):
        try:
            status = app(sys.argv[1:], prog_name=program, standalone_mode=False)
        except typer.Abort:
            sys.exit(130)
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # it has printed the help
                sys.exit(2)
            message = " ".join(error.format_message().split())
            if isinstance(error, WrongValue):
                raise Problem(f"{error.param.opts[0]} {error.message}") from None  # pyright: ignore[reportOptionalMemberAccess]
            raise Problem(f"the command line must be as --help says; got: {message}") from None
        sys.exit(status)
