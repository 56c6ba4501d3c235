"""Print the flags that a C or C++ build needs: `python -m mx_driving.config --cflags --libs`, or `--cmakedir` for CMake.

    cc program.c $(python -m mx_driving.config --cflags --libs)
    cmake -Dmx_driving_DIR=$(python -m mx_driving.config --cmakedir) ...

Exit status: 0; 1 when the package has no native library; 2 for a wrong command line.

The command does not import torch: see the package's `__init__`.
"""

from __future__ import annotations

import argparse
import pathlib
import shlex
import sys

from ._package_files import library_path, why_absent

__all__ = ["cflags", "cmakedir", "includedir", "libdir", "library_path", "libs", "main", "torch_library"]


def torch_library() -> str:
    """The library that registers the operators with PyTorch when it is loaded: by torch.ops.load_library, or a C++ program."""
    library = library_path()
    return str(_folder() / library.name.replace("mx_driving", "mx_driving_torch"))


def _folder() -> pathlib.Path:
    """Return the folder of the library, the headers and the CMake package."""
    library = library_path()
    if not library.exists():
        raise RuntimeError(why_absent(library))
    return library.parent.resolve()


def includedir() -> str:
    """Return the folder of `acl/acl.h`, `aclnnop/*.h` and `mx_driving.h`."""
    return str(_folder() / "include")


def libdir() -> str:
    """Return the folder of the shared library, libmx_driving."""
    return str(_folder())


def cmakedir() -> str:
    """The folder of mx_driving-config.cmake, whose target is mx_driving::mx_driving."""
    return str(_folder() / "cmake")


def cflags() -> str:
    """The compiler's flags, quoted for a shell."""
    return shlex.join(["-I" + includedir()])


def libs() -> str:
    """The linker's flags, quoted for a shell. Programs will look for the library where it is now."""
    return shlex.join(["-L" + libdir(), "-Wl,-rpath," + libdir(), "-lmx_driving"])


def main(arguments: list[str] | None = None) -> None:
    """Print the requested values on a single line, in the order cflags, libs, cmakedir, torch_library."""
    parser = argparse.ArgumentParser("python -m mx_driving.config", description="What a C or C++ build needs.")
    answers = {"--" + answer.__name__.replace("_", "-"): answer for answer in (cflags, libs, cmakedir, torch_library)}
    for option, answer in answers.items():
        parser.add_argument(option, action="append_const", const=answer, dest="chosen", help=(answer.__doc__ or "").rstrip("."))
    words = sys.argv[1:] if arguments is None else arguments
    wrong = [word for word in words if word not in (*answers, "-h", "--help")]
    if wrong or not words:
        parser.exit(2, f"mx_driving.config: arguments must be some of {', '.join(answers)}; got {' '.join(wrong) or 'none'}\n")
    asked = parser.parse_args(words).chosen
    try:
        print(*(answer() for answer in answers.values() if answer in asked))
    except RuntimeError as error:
        raise SystemExit(f"mx_driving.config: {error}") from None


if __name__ == "__main__":
    main()
