"""Build the sdist, and from the sdist a wheel for every platform, into dist: `make wheels`.

    python wheels/make.py [--again] [PLATFORM ...]

--again builds the files of dist once more, from the sdist in another folder, and fails if a byte differs. The same sources and
the tools of requirements.txt give the same bytes: times come from the last commit, files contain no paths, and a build
downloads nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from typing import NamedTuple

import ziglang
from sbom import add_bill

ZIG = pathlib.Path(ziglang.__file__).with_name("zig")
ROOT = pathlib.Path(__file__).parent.parent
DIST, BUILD = ROOT / "dist", ROOT / "build" / "wheels"


class Platform(NamedTuple):
    tag: str
    target: str  # the argument of `zig c++ -target`, with the lowest version of the system
    library: str

    @property
    def wheel(self) -> pathlib.Path:
        """Return the wheel in dist. There is only one per platform, because a build empties dist first."""
        (wheel,) = DIST.glob(f"*-py3-none-{self.tag}.whl")
        return wheel


# The platforms of torch's wheels since 2.6. torch has none for musl, for Intel Macs or for Windows on ARM.
PLATFORMS = {
    "linux-x86_64": Platform("manylinux2014_x86_64", "x86_64-linux-gnu.2.17", "libmx_driving.so"),
    "linux-aarch64": Platform("manylinux2014_aarch64", "aarch64-linux-gnu.2.17", "libmx_driving.so"),
    "macos-arm64": Platform("macosx_11_0_arm64", "aarch64-macos.11.0", "libmx_driving.dylib"),
    "windows-x86_64": Platform("win_amd64", "x86_64-windows-gnu", "mx_driving.dll"),
}


def sha256(file: pathlib.Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def environment() -> dict[str, str]:
    """Return the environment of a build: no compiler settings, and this Python's tools first in PATH."""
    taken = {name: text for name, text in os.environ.items() if name not in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS")}
    commit = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    if "SOURCE_DATE_EPOCH" not in taken:
        taken["SOURCE_DATE_EPOCH"] = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    return {**taken, "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), taken["PATH"]])}


def build(source: pathlib.Path, kind: str, to: pathlib.Path, settings: dict[str, str] | None = None) -> None:
    options = [f"--config-setting={key}={text}" for key, text in (settings or {}).items()]
    command = [sys.executable, "-m", "build", "--quiet", "--no-isolation", f"--{kind}", "--outdir", str(to), *options]
    subprocess.run([*command, str(source)], check=True, env=environment())


def settings_of(platform: Platform, source: pathlib.Path, folder: pathlib.Path) -> dict[str, str]:
    return {
        "build-dir": str(folder),
        "wheel.tags": f"py3-none-{platform.tag}",
        "install.strip": "false",  # the linker strips: this machine's strip cannot read files of other systems
        "cmake.define.CMAKE_TOOLCHAIN_FILE": str(source / "wheels" / "toolchain.cmake"),
        "cmake.define.MXD_ZIG": str(ZIG),
        "cmake.define.MXD_ZIG_TARGET": platform.target,
    }


def unpack(sdist: pathlib.Path, work: pathlib.Path) -> pathlib.Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    return work / sdist.name.removesuffix(".tar.gz")


def build_wheels(source: pathlib.Path, names: list[str], dist: pathlib.Path, work: pathlib.Path) -> None:
    for name in names:
        print(f"Building the wheel for {name}", flush=True)
        build(source, "wheel", dist, settings_of(PLATFORMS[name], source, work / name))
        (wheel,) = dist.glob(f"*-{PLATFORMS[name].tag}.whl")
        add_bill(wheel, int(environment()["SOURCE_DATE_EPOCH"]))


def build_all(names: list[str]) -> None:
    for folder in (DIST, BUILD):
        shutil.rmtree(folder, ignore_errors=True)
    build(ROOT, "sdist", DIST)
    build_wheels(unpack(the_sdist(), BUILD), names, DIST, BUILD)
    for file in sorted(DIST.iterdir()):
        print(f"{sha256(file)}  {file.name}  {file.stat().st_size:,} bytes")


def the_sdist() -> pathlib.Path:
    sdists = list(DIST.glob("*.tar.gz"))
    if len(sdists) != 1:
        raise SystemExit(f"make.py: {DIST} must hold one sdist, of a build before; got {len(sdists)}")
    return sdists[0]


def build_again(names: list[str]) -> None:
    """Build again from the sdist in dist, so that the sources may change meanwhile."""
    if missing := [name for name in names if not PLATFORMS[name].wheel.exists()]:
        raise SystemExit(f"make.py: {DIST} must hold the wheels to compare with; there is none for {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        dist, work = pathlib.Path(folder, "dist"), pathlib.Path(folder, "work")
        with tarfile.open(the_sdist()) as archive:
            os.environ["SOURCE_DATE_EPOCH"] = str(archive.getmembers()[0].mtime)
        os.environ["ZIG_GLOBAL_CACHE_DIR"] = str(pathlib.Path(folder, "zig"))  # so that nothing of the first build is reused
        source = unpack(the_sdist(), work)
        (source / "PKG-INFO").unlink()  # generated, not a source
        build(source, "sdist", dist)
        build_wheels(source, names, dist, work)
        different = [file.name for file in dist.iterdir() if sha256(file) != sha256(DIST / file.name)]
    if different:
        raise SystemExit("Two builds of the same sources differ: " + ", ".join(different))
    print(f"Two builds in two folders gave the same bytes: the sdist, {', '.join(names)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The sdist and the wheels, into dist")
    parser.add_argument("--again", action="store_true", help="build what dist holds once more and compare")
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=f"{', '.join(PLATFORMS)}; all, if none is named")
    options = parser.parse_args()
    if unknown := set(options.platforms) - PLATFORMS.keys():
        raise SystemExit(f"make.py: PLATFORM must be one of {', '.join(PLATFORMS)}; got {', '.join(sorted(unknown))}")
    (build_again if options.again else build_all)(options.platforms or list(PLATFORMS))


if __name__ == "__main__":
    main()
