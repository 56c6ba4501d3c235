"""Builds the sdist, and from it a wheel for every platform, into dist: `make wheels`.

    python wheels/make.py [--again]

--again builds everything a second time, elsewhere, and fails if one byte differs. The same sources and the tools of
requirements.txt give the same files: times come from the last commit, paths are left out, and nothing is fetched.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

import ziglang
from platforms import BUILD, DIST, PLATFORMS, ROOT, Platform, sha256

ZIG = pathlib.Path(ziglang.__file__).with_name("zig")


def environment() -> dict[str, str]:
    """Without a compiler's or a builder's own settings; with the tools beside this Python first."""
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
        "install.strip": "false",  # the linker does it: the machine's own strip knows no other system's files
        "cmake.define.CMAKE_TOOLCHAIN_FILE": str(source / "wheels" / "toolchain.cmake"),
        "cmake.define.MXD_ZIG": str(ZIG),
        "cmake.define.MXD_ZIG_TARGET": platform.target,
    }


def build_all(dist: pathlib.Path, work: pathlib.Path) -> None:
    for folder in (dist, work):
        shutil.rmtree(folder, ignore_errors=True)
    build(ROOT, "sdist", dist)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    source = work / sdist.name.removesuffix(".tar.gz")
    for name, platform in PLATFORMS.items():
        print(f"Building the wheel for {name}", flush=True)
        build(source, "wheel", dist, settings_of(platform, source, work / name))


def hashes(dist: pathlib.Path) -> dict[str, str]:
    return {file.name: sha256(file) for file in sorted(dist.iterdir())}


def check_again(first: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ZIG_GLOBAL_CACHE_DIR"] = str(pathlib.Path(folder, "zig"))  # so that nothing is taken from the first build
        build_all(pathlib.Path(folder, "dist"), pathlib.Path(folder, "work"))
        second = hashes(pathlib.Path(folder, "dist"))
    different = [name for name in first | second if first.get(name) != second.get(name)]
    if different:
        raise SystemExit("Two builds of the same sources differ: " + ", ".join(different))
    print("Two builds in two folders gave the same bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="The sdist and the wheels, into dist")
    parser.add_argument("--again", action="store_true", help="build twice and compare")
    again = parser.parse_args().again
    build_all(DIST, BUILD)
    built = hashes(DIST)
    for name, digest in built.items():
        print(f"{digest}  {name}  {(DIST / name).stat().st_size:,} bytes")
    if again:
        check_again(built)


if __name__ == "__main__":
    main()
