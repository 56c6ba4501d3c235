"""The files of mx_driving that PyInstaller must add to a frozen program, because no import statement names them."""

import importlib.util
import pathlib

_spec = importlib.util.find_spec("mx_driving")
_folders = [pathlib.Path(folder) for folder in _spec.submodule_search_locations or ()] if _spec else []


def _find(*patterns: str) -> list[tuple[str, str]]:
    """Return the path of each file, and its folder in the program."""
    files = [(folder, file) for folder in _folders for pattern in patterns for file in sorted(folder.glob(pattern))]
    return [(str(file), str(pathlib.Path("mx_driving", file.relative_to(folder)).parent)) for folder, file in files]


binaries = _find("*mx_driving*.so", "*mx_driving*.dylib", "*mx_driving*.dll")
datas = _find("_patch/*.jsonl", "viz/_template/*", "kernels/_hub/*.py")
# A call on a GPU imports the module with the operator's name. Triton compiles from the source.
hiddenimports = [f"mx_driving._backends.triton.{pathlib.Path(file).stem}" for file, _ in _find("_backends/triton/[a-z]*.py")]
module_collection_mode = {"mx_driving._backends.triton": "pyz+py"}
