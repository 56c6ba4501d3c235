"""A plugin of pytest for `make fuzz-native`: the package loads the library that FUZZ_LIBRARY names, which has a sanitizer."""

import os
import pathlib
import sys
import types

PATH = pathlib.Path(os.environ["FUZZ_LIBRARY"])
sys.modules["mx_driving._library_path"] = types.SimpleNamespace(library_path=lambda: PATH)  # pyright: ignore[reportArgumentType]
