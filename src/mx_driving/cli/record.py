"""`mx-driving record`: runs a program and records it. The work is done by mx_driving_portable/record.py."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

AS_GIVEN = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def record(
    arguments: Annotated[
        list[str], typer.Argument(help="`--out calls` and other options, then the program and its arguments.")
    ],
) -> None:
    """Run a program, and record its calls of sampling operators for `mx-driving replay`.

    It is `python -m mx_driving_portable.record`, and `mx-driving record -h` prints its options. Where this package is not
    installed, the file mx_driving_portable/record.py alone does the same.

    Example: `mx-driving record --out calls --every 11 train.py --epochs 1`
    """
    from mx_driving_portable.record import main

    sys.argv = ["mx-driving record", *arguments]
    main()
