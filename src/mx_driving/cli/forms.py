"""`mx-driving forms`: the sampling cores and attention modules of a package, and the forms that `patch` has for them."""

from __future__ import annotations

from typing import Annotated

import typer

from .._operator.problems import Problem
from .._show import print_json
from .options import Json


def forms(
    target: Annotated[str, typer.Argument(help="A package that can be imported, or a folder of Python files.")],
    rows: Annotated[bool, typer.Option("--rows", help="Print the lines of known.jsonl for code that is not known.")] = False,
    seen: Annotated[str, typer.Option(help="With --rows: the project and its version.")] = "",
    as_json: Json = False,
) -> None:
    """List the sampling cores and attention modules of a package.

    A line says whether `patch` knows the code, which form computes the same, and by how much the results differ in float64.
    Unknown code is imported and run on small examples.

    Example: `mx-driving forms transformers`
    """
    from .._patch._survey import make_entry, survey

    try:
        findings = survey(target)
    except ImportError as error:
        raise Problem(f"target must be a package or a folder; got {target}: {error}") from None
    if as_json:
        print_json({"right": True, "forms": [{k: v for k, v in vars(f).items() if k != "fit"} for f in findings]})
    elif rows:
        print("\n".join(dict.fromkeys(make_entry(f, seen) for f in findings if f.fit and f.state != "known")))
    else:
        print("\n".join(map(str, findings)) or f"{target} has no sampling core and no attention module")
