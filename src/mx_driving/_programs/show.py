"""How a command prints: no word and no number is cut, wherever it goes."""

from __future__ import annotations

from typing import Any


def open_console(title: str) -> Any:
    """A console with the title on it. It is printed before the work, so that an output that takes nothing is noticed then."""
    from rich.console import Console
    from rich.markup import escape

    console = Console()
    say(console, f"[italic]{escape(title)}[/]")
    console.file.flush()
    return console


def say(console: Any, text: str) -> None:
    """Lines: wrapped between words on a terminal where words fit, left alone elsewhere."""
    fits = console.is_terminal and all(len(word) < console.width for word in text.split())
    console.print(text, highlight=False, soft_wrap=not fits)


def show(console: Any, table: Any) -> None:
    """A table, as wide as it must be: a narrow terminal wraps its lines, and cuts nothing."""
    wanted = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.width = max(console.width, wanted)
    console.print(table)


def grid(title: str | None, left: dict[str, int], right: dict[str, int]) -> Any:
    """A table of text columns and of numbers' columns: header and least width, so that tables in a row line up."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for justify, columns in (("left", left), ("right", right)):
        for header, width in columns.items():
            table.add_column(header, justify=justify, min_width=width)  # pyright: ignore
    return table
