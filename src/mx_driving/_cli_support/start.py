"""How a program starts: a wrong command line ends it with one sentence on standard error, as every failure does."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import typer

from .problems import Problem, in_a_sentence

_UsageError: Any = typer.BadParameter.__base__  # typer's own, or click's with an older typer


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
            raise Problem(_explain(error)) from None
        sys.exit(status)


def _explain(error: Any) -> str:
    """Return the sentence for a command line that typer refuses."""
    kind, param, message = type(error).__name__, getattr(error, "param", None), error.format_message()
    name = getattr(error, "option_name", None) or (param and (param.opts[0] if param.opts else param.name))
    if error.message.startswith("must "):
        return f"{name} {error.message}"
    if kind == "MissingParameter":
        return f"{name} must be given; got none"
    if kind == "NoSuchOption":
        params = error.ctx.command.get_params(error.ctx)
        options = [option for param in params for option in param.opts if option.startswith("-")]
        return f"an option must be one of {', '.join(options)}; got {name}"
    if kind == "BadOptionUsage":
        return f"{name} must have a value; got none" if "requires" in message else f"{name} must have no value; got one"
    if unknown := re.fullmatch(r"No such command '(.*)'\.", message):
        return f"the command must be one of {', '.join(error.ctx.command.commands)}; got {unknown[1]}"
    if extra := re.fullmatch(r"Got unexpected extra arguments?\(?s?\)? \((.*)\)", message):
        arguments = [param.name for param in error.ctx.command.params if param.param_type_name == "argument"]
        return f"the command must have no arguments{' but ' if arguments else ''}{', '.join(arguments)}; got {extra[1]}, too"
    return f"the command line must be as --help says; got: {' '.join(message.split())}"
