"""The package's files that are not modules: the native library and texts. A tool that packs a program may lose them. Also the
commands that install missing packages.

These functions are not in config.py, because `python -m mx_driving.config` warns if config.py is imported already.
"""

from __future__ import annotations

import json
import pathlib
import pkgutil
import shlex
import sys

_OURS = "mx-driving-portable"


def library_path() -> pathlib.Path:
    """Return the path of the shared library: beside this file, or in the other folder of an editable installation."""
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    name = ("" if sys.platform == "win32" else "lib") + "mx_driving" + suffix
    paths = [pathlib.Path(folder, name) for folder in sys.modules["mx_driving"].__path__]
    return next((path for path in paths if path.exists()), paths[0])


def why_absent(path: pathlib.Path) -> str:
    """Return a sentence that says that a file of the package is absent, and why."""
    reason = "it was not built or not installed"
    if getattr(sys, "frozen", False):
        reason = "the program was frozen without it; with PyInstaller, --collect-all mx_driving adds it"
    elif any(parent.is_file() for parent in path.parents):
        reason = "the package is in an archive, from which no library can be loaded; unpack it"
    return f"{path.name} is not in the package: {reason}"


def read_text(name: str) -> str:
    """Return the text of a file of the package, also from an archive. `name` is the file's path below the package's folder."""
    path = pathlib.Path(__file__).parent / name
    try:
        content = pkgutil.get_data("mx_driving", name)
    except OSError:
        content = None
    if content is None:
        raise FileNotFoundError(f"{path} must be a file of the package; got none: {why_absent(path)}")
    return content.decode()


def pip_install(*packages: str) -> str:
    """Return the command that installs packages. A name such as "[demo]" is an extra of ours."""
    import importlib.metadata  # here, because few programs lack a package

    # Say "." in a clone: there the package runs from the source tree, or was installed from the folder, editable or not.
    try:
        direct_url = importlib.metadata.distribution(_OURS).read_text("direct_url.json")
        ours = "." if "dir_info" in json.loads(direct_url or "{}") else _OURS
    except importlib.metadata.PackageNotFoundError:
        ours = "."
    return "pip install " + " ".join(shlex.quote(ours + name if name.startswith("[") else name) for name in packages)
