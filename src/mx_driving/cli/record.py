"""`mx-driving record`: runs a program and records it. The work is done by mx_driving_portable/record.py."""

from __future__ import annotations

from typing import Annotated

import typer

from mx_driving_portable.record import EVERY, MEGABYTES, run_program, start_program

from .._cli_support.problems import Problem

AS_GIVEN = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def record(
    program: Annotated[str, typer.Argument(help="The program to run.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    out: Annotated[str, typer.Option("--out", help="Folder to make.")] = "calls",
    every: Annotated[
        int, typer.Option("--every", help="Record the first call of each function, and then every so many.")
    ] = EVERY,
    nan: Annotated[
        bool, typer.Option("--nan", help="Also record the first call with a NaN. A device then waits at each call.")
    ] = False,
    megabytes: Annotated[float, typer.Option("--megabytes", help="The most to write.")] = MEGABYTES,
    function: Annotated[
        list[str] | None, typer.Option("--function", help="Another function, `package.name=operator`; may be repeated.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="The program is a module, as in `python -m`.")] = False,
) -> None:
    """Run a program, and record its calls of sampling operators for `mx-driving replay`.

    `python -m mx_driving_portable.record` is the same program. Where this package is not installed, copy the file
    mx_driving_portable/record.py: it needs torch alone.

    Example: `mx-driving record --out calls --every 11 train.py --epochs 1`
    """
    named = {name: operator for name, _, operator in (words.partition("=") for words in function or ())}
    try:
        recorder = start_program(program, module, out=out, every=every, nan=nan, megabytes=megabytes, functions=named)
    except (ValueError, OSError) as error:
        raise Problem(str(error)) from None
    run_program(recorder, program, arguments or [], module)
