"""`mx-driving record`: its help. mx_driving_portable/record.py reads the options and does the work."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mx_driving_portable.record import EVERY, MEGABYTES, main


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
    main("mx-driving", sys.argv[2:])
