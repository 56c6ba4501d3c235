"""A plugin of pytest for `make fuzz-native`: the package loads the library that FUZZ_LIBRARY names, which has a sanitizer."""

import importlib.util
import os
import pathlib
import sys

NAME = "mx_driving._package_files"
SPEC = importlib.util.spec_from_file_location(NAME, pathlib.Path(__file__).parents[2] / "src/mx_driving/_package_files.py")
assert SPEC is not None
assert SPEC.loader is not None
sys.modules[NAME] = MODULE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MODULE)
MODULE.library_path = lambda: pathlib.Path(os.environ["FUZZ_LIBRARY"])  # pyright: ignore[reportAttributeAccessIssue]
