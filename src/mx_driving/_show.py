"""Print the output of a command. No word and no number is cut, in any terminal or file."""

from __future__ import annotations

import json
import math
from typing import Any


def open_console(title: str) -> Any:
    """Return a console and print the title. Call it before the work, so that an unusable output fails at once."""
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    say(console, f"[italic]{escape(title)}[/]")
    console.file.flush()
    return console


def say(console: Any, text: str) -> None:
    """Print lines. Wrap them between words if every word fits on the terminal; otherwise keep lines whole."""
    fits = console.is_terminal and all(len(word) < console.width for word in text.split())
    console.print(text, highlight=False, soft_wrap=not fits)


def show(console: Any, table: Any) -> None:
    """Print a table at its full width. A narrow terminal wraps the lines and cuts nothing."""
    width = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.width = max(console.width, width)
    console.print(table)


def grid(title: str | None, left: dict[str, int], right: dict[str, int]) -> Any:
    """Make a table. `left` (text) and `right` (numbers) are columns: header -> least width. Tables of equal widths align."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for justify, columns in (("left", left), ("right", right)):
        for header, width in columns.items():
            table.add_column(header, justify=justify, min_width=width)  # pyright: ignore
    return table


def print_json(results: dict[str, Any]) -> None:
    """Print one JSON object: `right` (true if the exit status is 0), and lists of results.

    The keys of a result are a table's columns. Infinite numbers and NaN become null.
    """
    print(json.dumps(_finite(results), indent=2, default=str))


def _finite(results: Any) -> Any:
    if isinstance(results, dict):
        return {str(key): _finite(result) for key, result in results.items()}
    if isinstance(results, list | tuple):
        return [_finite(result) for result in results]
    return None if isinstance(results, float) and not math.isfinite(results) else results
