"""`mx-driving replay`: calls that were recorded on a device, computed once more and judged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from .._cli_support.files import writable, writable_picture
from .._cli_support.problems import Problem, matching, ruled
from .._cli_support.show import open_console, say, show
from .options import Threads, use_threads


def replay(
    calls: Annotated[str, typer.Argument(help="Folder that record.py wrote, or one file of it.")],
    only: Annotated[
        list[str] | None, typer.Option("--call", help="Only calls whose name matches, e.g. `'*000012'`; may be repeated.")
    ] = None,
    threads: Threads = 0,
    out: Annotated[Path | None, typer.Option("--csv", help="Write the rows to this file.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw the rows to this file.")] = None,
) -> None:
    """Judge recorded calls: was it the operator?

    Each call of the recording is computed in float64, in float32 and by our kernels, on the recorded inputs. The table says
    how far the device's output and gradients are from float64, in units of what their dtype may lose: up to 1 is right, as
    for our own kernels in the tests. "float32" is the reference in the recorded dtypes, and "ours" our kernels.

    A wrong result is compared with what known mistakes would give: differences of vendors' versions, x and y swapped, half a
    pixel of shift, and more. The first that gives the same numbers is named. "Coarse" is a result that is only as inexact as
    sums in 16 bits.

    Calls are recorded on the device's machine by `python record.py program.py`; the file is mx_driving_portable/record.py.

    A remark names calls that the vendor's device would refuse, by the documented limits of Atlas A2: it changes no verdict.

    Exit status 0 means: every call could be read, and every result is right or coarse.

    Example: `mx-driving replay calls --csv calls.csv --plot calls.png`
    """
    from rich.progress import track

    from ..replay import _schema
    from ..replay import calls as recorded
    from ..replay import show as shown
    from ..replay.judge import WRONG, Verdict, judge

    if not calls:  # as a path it would be the working folder
        raise Problem("calls must be a folder that record.py wrote, or one file of it; got ''")
    path = Path(calls)
    found = recorded.stems(path)
    names = {str(stem.relative_to(path)) if path.is_dir() else stem.name: stem for stem in found}
    chosen = [names[name] for name in matching("--call", only, names)]
    if out:
        writable("--csv", out)
    if picture:
        writable_picture("--plot", picture, "mx-driving replay --plot")
    use_threads(threads)
    console = open_console(f"mx-driving replay: {calls}")
    problems: list[Any] = recorded.unfinished(path)
    verdicts: list[Verdict] = []
    reading = recorded.read(path, chosen)
    for one in track(reading, description="judging", total=len(chosen), console=console, transient=True):
        try:
            if isinstance(one, Problem):
                raise one
            problems += one.problems
            with ruled(f"{one.name} must be a call that can be judged"):
                verdicts.append(judge(one))
        except Problem as problem:
            problems.append(problem)
    if verdicts:
        show(console, shown.table(verdicts))
    for verdict in verdicts:
        for sentence in shown.sentences(verdict):
            say(console, sentence)
    for remark in shown.remarks(verdicts):
        say(console, remark)
    for history in _schema.histories(path):
        if isinstance(history, Problem):
            problems.append(history)
        else:
            say(console, escape(history))
    for problem in problems:
        say(console, f"[bold red]not read:[/] {escape(str(problem))}")
    if out:
        shown.write(verdicts, out)
    if picture and verdicts:
        shown.plot(verdicts, picture)
    wrong = sum(verdict.word == WRONG for verdict in verdicts)
    if wrong or problems:
        say(console, f"[bold red]{_outcome(wrong, len(verdicts), len(problems))}[/]")
        raise typer.Exit(1)
    say(console, f"[bold green]all is well[/]: {len(verdicts)} calls are right")


def _outcome(wrong: int, judged: int, problems: int) -> str:
    """The last line where not all is well."""
    calls = f"{wrong} of {judged} calls wrong" if judged else "no call was judged"
    return calls + (f", {problems} {'thing' if problems == 1 else 'things'} not read" if problems else "")
