"""`mx-driving record`: passes its command line to mx_driving_portable/record.py, which has the options and the help."""

from __future__ import annotations

import typer

from mx_driving_portable.record import main

AS_GIVEN = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False, "help_option_names": []}


def record(context: typer.Context) -> None:
    """Run a program, and record its calls of sampling operators for `mx-driving replay`."""
    main("mx-driving", context.args)
