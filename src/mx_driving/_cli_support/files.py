"""Files that a command reads or writes. It checks them before the work, so that no result is lost after it."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from .problems import Problem, need

PICTURES = "[demo]"


def writable(name: str, path: Path) -> None:
    """Check that the file can be written later. Nothing is created, and a file that is there is not touched."""
    with writing(name, path):
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
        elif not path.exists():  # pipes and devices are opened when there is something to write
            tempfile.TemporaryFile(dir=folder).close()


def folder_of_pictures(name: str, path: Path, what: str) -> None:
    """Check that pictures can be written in the folder later. It need not be there yet."""
    need(what, PICTURES, "matplotlib", "PIL")
    with writing(name, path):
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists() or folder.is_symlink())
        if not there.is_dir():
            raise Problem(f"{name} must be a folder; got {path}, where {there} is none")
        tempfile.TemporaryFile(dir=there).close()


@contextmanager
def writing(name: str, path: Path) -> Iterator[None]:
    """Turn an error of the operating system into a Problem."""
    try:
        yield
    except OSError as error:
        raise Problem(f"{name} must be a place to write to; got {path}: {error.strerror or error}") from None


def writable_picture(name: str, path: Path, what: str) -> None:
    """As `writable`, and matplotlib must know the ending."""
    need(what, PICTURES, "matplotlib", "PIL")
    from matplotlib.figure import Figure

    _ending(name, path, lambda ending: Figure(figsize=(1, 1)).savefig(io.BytesIO(), format=ending))
    writable(name, path)


def writable_photograph(name: str, path: Path, what: str) -> None:
    """As `writable`, and Pillow must be able to write pixels in the ending's format."""
    need(what, PICTURES, "PIL")
    from PIL import Image

    _ending(name, path, lambda ending: Image.new("RGB", (8, 8)).save(io.BytesIO(), photograph_format(path)))
    writable(name, path)


def photograph_format(path: Path) -> str:
    """Pillow's name of the ending's format."""
    from PIL import Image

    return Image.registered_extensions()[path.suffix.lower()]


def _ending(name: str, path: Path, attempt: Any) -> None:
    """Write a picture to memory: a writer may be registered and still not work."""
    ending = path.suffix.lower()[1:]
    try:
        if not ending:
            raise ValueError("no ending")
        attempt(ending)
    except Exception:  # each writer has errors of its own
        raise Problem(f"{name} must end in a kind of picture such as .png, .jpg or .pdf; got {path.name!r}") from None


def open_picture(name: str, path: Path, kind: type[Problem] = Problem) -> Any:
    """A Pillow image in RGB."""
    from PIL import Image

    if not os.path.isfile(path):  # pathlib fails on a name that is too long
        raise kind(f"{name} must exist; got {path}")
    try:
        return Image.open(path).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise kind(f"{name} must be a picture; got {error}") from None


def read_arrays(name: str, path: Path) -> dict[str, Any]:
    """What an .npz file holds, by name."""
    import numpy

    try:
        found: Any = numpy.load(path)
        if isinstance(found, numpy.lib.npyio.NpzFile):
            return dict(found)
    except (BadZipFile, EOFError, OSError, ValueError) as error:
        raise Problem(f"{name} must be an .npz file; got {path}: {error}") from None
    raise Problem(f"{name} must be an .npz file, of arrays by name; got {path}, an array")
