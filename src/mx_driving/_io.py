"""What commands print, and the files that they read and write.

No word and no number of a printed text is cut, in any terminal or file. Commands check paths before the work, so that no result
is lost afterwards.
"""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ._operator.rules import Problem, first_line

_LONGEST = 200  # most characters of a library's message: numpy quotes whole headers


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


def writable(name: str, path: Path, inputs: Sequence[Path] = ()) -> None:
    """Check that the file can be written, and is not an input of the command. Create and change nothing."""
    with writing(name, path):
        if path.exists() and any(file.exists() and file.samefile(path) for file in inputs):
            raise Problem(f"{name} must be another file than those that are read; got {path}")
        path = Path(os.path.realpath(path)) if path.is_symlink() else path
        folder = path.parent
        if not folder.exists():
            raise Problem(f"the folder of {name} must exist; got {folder}")
        if not folder.is_dir():
            raise Problem(f"the folder of {name} must be a folder; got {folder}")
        if path.is_dir():
            raise Problem(f"{name} must be a file; got {path}, a folder")
        if path.is_file():
            os.close(os.open(path, os.O_WRONLY))
        elif not path.exists():  # an existing pipe or device is not opened before there is a result
            tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def writing(name: str, path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a Problem."""
    try:
        yield
    except OSError as error:
        raise Problem(f"{name} must be a place to write to; got {path}: {error.strerror or error}") from None


def write_csv(rows: list[dict[str, Any]], path: Path, if_empty: str = "") -> None:
    """Write rows with a header of all their columns. Without rows, the header is `if_empty`."""
    columns = list(dict.fromkeys(column for row in rows for column in row)) or [if_empty]
    with writing("--csv", path), path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder and remove it after the block. In the block, turn a full disk into a Problem about this folder."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise Problem(f"the temporary folder {tempfile.gettempdir()} must have room; got {error.strerror}") from None


def read_arrays(name: str, path: Path) -> dict[str, Any]:
    """Return the arrays of an .npz file by name, in this machine's byte order."""
    import numpy

    try:
        with open(path, "rb") as file:
            loaded: Any = numpy.load(file)
            arrays = dict(loaded.items()) if isinstance(loaded, numpy.lib.npyio.NpzFile) else None
    except Exception as error:  # numpy, zipfile and its decompressors raise a dozen classes
        fact = getattr(error, "strerror", None) or first_line(error)
        raise Problem(f"{name} must be an .npz file; got {path}: {fact[:_LONGEST]}") from None
    if arrays is None:
        raise Problem(f"{name} must be an .npz file, of arrays by name; got {path}, an array")
    if others := [member for member, array in arrays.items() if not isinstance(array, numpy.ndarray)]:
        raise Problem(f"{name} must be an .npz file, of arrays by name; got {path}, whose member {others[0]} is no array")
    return {array: t.astype(t.dtype.newbyteorder("="), copy=False) for array, t in arrays.items()}
