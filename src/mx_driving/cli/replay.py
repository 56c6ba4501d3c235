"""`mx-driving replay`: compute calls that were recorded on a device again, and judge the recorded results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from .._files import writable, write_csv
from .._operator.problems import Problem, ruled
from .._show import open_console, print_json, say, show
from .._vendor.limits import suspended
from .options import Csv, Json, Threads, use_threads
from .start import matching


def replay(
    calls: Annotated[str, typer.Argument(help="Folder that record.py wrote, or one file of it.")],
    only: Annotated[
        list[str] | None, typer.Option("--call", help="Only calls whose name matches, e.g. `'*000012'`; may be repeated.")
    ] = None,
    threads: Threads = 0,
    out: Csv = None,
    as_json: Json = False,
) -> None:
    """Check recorded calls of the operators against float64.

    Each call of the recording is computed in float64, in float32 and by our kernels, on the recorded inputs. The table has
    the errors of the device's output and gradients against float64, in units of what rounding may lose: up to 1 is
    right. "float32" is the reference in the recorded dtypes, and "ours" our kernels.

    A wrong result is compared with the results of known mistakes: differences of vendors' versions, x and y swapped, half a
    pixel of shift, and more. The first mistake that gives the same numbers is named. "Coarse" means an error typical of
    16-bit sums.

    Calls are recorded on the device's machine by `python record.py program.py`; the file is mx_driving_portable/record.py.

    Exit status 0: every call could be read, and every result is right or coarse.

    Example: `mx-driving replay calls --csv calls.csv`
    """
    from .._replay import show as texts
    from .._replay.calls import find_calls, list_files

    if not calls:  # Path("") is the working folder
        raise Problem("calls must be a folder that record.py wrote, or one file of it; got ''")
    path = Path(calls)
    stems = find_calls(path)
    stems = {name: stems[name] for name in matching("--call", only, stems)}
    if out:
        writable("--csv", out, [path.with_name("manifest.json"), path / "manifest.json", *list_files(stems.values())])
    use_threads(threads)
    console = None if as_json else open_console(f"mx-driving replay: {path}")
    verdicts, problems = _judge_all(stems, console)
    rows = [row for verdict in verdicts for row in texts.make_rows(verdict)]
    wrong = sum(verdict.is_wrong for verdict in verdicts)
    if out:
        write_csv(rows, out, "call")
    if console:
        for verdict in verdicts:
            say(console, texts.make_headline(verdict))
            show(console, texts.make_table(verdict))
        sentences = [sentence for verdict in verdicts for sentence in texts.make_sentences(verdict)]
        not_read = [f"[bold red]not read:[/] {escape(problem)}" for problem in problems]
        judged = len(verdicts)
        if wrong or problems:
            outcome = "[bold red]" + (f"{wrong} of {judged} calls wrong" if judged else "no call was judged")
            outcome += f", {len(problems)} {'thing' if len(problems) == 1 else 'things'} not read[/]" if problems else "[/]"
        else:
            outcome = f"[bold green]all is well[/]: {judged} {'call is' if judged == 1 else 'calls are'} right"
        for sentence in (*sentences, *not_read, outcome):
            say(console, sentence)
    else:
        print_json(
            {
                "right": not (wrong or problems),
                "results": rows,
                "notes": [{"call": verdict.call.name, "note": note} for verdict in verdicts for note in verdict.notes],
                "not_read": problems,
            }
        )
    if wrong or problems:
        raise typer.Exit(1)


def _judge_all(stems: dict[str, Path], console: Any) -> tuple[list[Any], list[str]]:
    """Return the verdicts, and sentences about calls and results that could not be read or judged."""
    from rich.progress import track

    from .._replay.calls import read
    from .._replay.judge import judge

    verdicts, problems = [], []
    for name in track(stems, description="judging", console=console, transient=True, disable=console is None):
        try:  # suspended() lifts the vendor's limits, which the environment may set.
            with suspended(), ruled(f"{name} must be a call that can be judged"):
                call, left_out = read(name, stems[name])
                problems += left_out
                if call.results:
                    verdicts.append(judge(call))
        except Problem as problem:
            problems.append(str(problem))
    return verdicts, problems
