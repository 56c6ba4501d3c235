"""The platforms for which torch 2.6 and later has wheels on PyPI: none for musl, for Macs with Intel processors, for Windows on
ARM."""

from __future__ import annotations

import hashlib
import pathlib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
DIST, BUILD = ROOT / "dist", ROOT / "build" / "wheels"


def sha256(file: pathlib.Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Platform(NamedTuple):
    tag: str
    target: str  # of `zig c++ -target`, with the lowest version of the system
    library: str

    @property
    def wheel(self) -> pathlib.Path:
        """The file in dist; there is one, because a build empties dist first."""
        (found,) = DIST.glob(f"*-py3-none-{self.tag}.whl")
        return found


PLATFORMS = {
    "linux-x86_64": Platform("manylinux2014_x86_64", "x86_64-linux-gnu.2.17", "libmx_driving.so"),
    "linux-aarch64": Platform("manylinux2014_aarch64", "aarch64-linux-gnu.2.17", "libmx_driving.so"),
    "macos-arm64": Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "libmx_driving.dylib"),
    "windows-x86_64": Platform("win_amd64", "x86_64-windows-gnu", "mx_driving.dll"),
}
