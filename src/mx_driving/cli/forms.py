"""`mx-driving forms`: the sampling cores and attention modules of a package, and the forms that `patch` has for them."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from .._io import print_json
from .._operator.rules import Problem
from .start import Json


def forms(
    target: Annotated[str, typer.Argument(help="A package that can be imported, or a folder of Python files.")],
    rows: Annotated[bool, typer.Option("--rows", help="Print the lines of known.jsonl for code that is not known.")] = False,
    seen: Annotated[str, typer.Option(help="With --rows: the project and its version.")] = "",
    as_json: Json = False,
) -> None:
    """List the sampling cores and attention modules of a package.

    A line says whether `patch` knows the code, which form computes the same, and by how much the results differ in float64.
    Unknown code is imported and run on small examples. Exit status 1: a file cannot be imported, or its text mentions a
    core that is not found.

    Example: `mx-driving forms transformers`
    """
    from .._patch._patch import survey
    from .._patch._trial import make_entry
    from .._patch.known import format_entry

    try:
        if not target:
            raise ImportError("the name is empty")
        with contextlib.redirect_stdout(sys.stderr):  # Standard output is for our results, not for prints of the files.
            findings, unread = survey(target)
    except ImportError as error:
        raise Problem(f"target must be a package or a folder; got {target!r}: {error}") from None
    if as_json:
        listed = [{k: v for k, v in vars(f).items() if k != "fit"} for f in findings]
        print_json({"right": not unread, "forms": listed, "unread": unread})
    elif rows:
        print("\n".join(dict.fromkeys(format_entry(*make_entry(f, seen)) for f in findings if f.fit and f.state != "known")))
    else:
        lines = [*map(str, findings), *(f"unread   {name}: {reason}" for name, reason in unread.items())]
        print("\n".join(lines) or f"{target} has no sampling core and no attention module")
    if unread:  # A missing package must not look like a folder without cores.
        raise typer.Exit(1)
