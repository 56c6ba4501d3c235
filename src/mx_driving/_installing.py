"""Commands that install missing packages. In a clone of the repository, they install the extras of the clone."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shlex

_OURS = "mx-driving-portable"


@functools.cache
def _is_clone() -> bool:
    """Return whether the package runs from a source tree, or was installed from a folder, editable or not."""
    try:
        direct_url = importlib.metadata.distribution(_OURS).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return True
    return "dir_info" in json.loads(direct_url or "{}")


def pip_install(*packages: str) -> str:
    """Return the command that installs packages. A name such as "[demo]" is an extra of ours."""
    ours = "." if _is_clone() else _OURS
    return "pip install " + " ".join(shlex.quote(ours + name if name.startswith("[") else name) for name in packages)
