"""Check every wheel in dist, and write docs/support/wheels.csv: `make check-wheels`.

    python wheels/check.py [PLATFORM ...]

Checks the size and the files of a wheel, the imports and exports of its library, and the oldest system that can load it. Then
links tests/native with the library and runs them: here, under qemu-user (aarch64) or under Wine (Windows). Linux cannot run a
Mac's programs, so the macOS tests are only linked, and the table says so.

Needs Debian's qemu-user, libc6-arm64-cross and wine64.
"""

from __future__ import annotations

import csv
import datetime
import pathlib
import platform as machine
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable

import lief
from make import PLATFORMS, ROOT, ZIG, Platform, environment
from sbom import check_bill

TABLE = ROOT / "docs" / "support" / "wheels.csv"
COLUMNS = ["platform", "wheel", "bytes", "built_by", "checked", "run", "date"]
MOST_BYTES = 2_000_000
CASES = 2500  # random calls of tests/native/compare, each with its gradients
ENVIRONMENT = {**environment(), "WINEDEBUG": "-all"}
WINE = shutil.which("wine64") or "/usr/lib/wine/wine64"


def holds(condition: object, sentence: str) -> None:
    if not condition:
        raise SystemExit(f"check.py: {sentence}")


def output_of(*command: object) -> str:
    holds(shutil.which(str(command[0])), f"docs/maintaining.md names what the checks run; got no {command[0]}")
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    holds(done.returncode == 0, f"{command[0]} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_inside(platform: Platform, folder: pathlib.Path) -> None:
    """Check that the only libraries in the wheel are ours and the library that registers it with PyTorch."""
    holds(platform.wheel.stat().st_size < MOST_BYTES, f"{platform.wheel.name} has 2 MB or more")
    allowed = {".py", ".h", ".cpp", ".cmake", ".typed", ".lib", ".html", ".css", ".js", ".jsonl"}
    others = {file.name for file in (folder / "mx_driving").rglob("*") if file.is_file() and file.suffix not in allowed}
    holds(
        others == {platform.library, platform.library.replace("mx_driving", "mx_driving_torch")},
        f"{platform.wheel.name} holds {others}",
    )


HEADERS = {"_mh_dylib_header", "__dso_handle", "_dso_handle"}  # the linker adds them to every Mach-O library


def imports_and_exports(library: pathlib.Path) -> tuple[set[str], set[str]]:
    image = lief.parse(library)
    exported = image.get_export().entries if isinstance(image, lief.PE.Binary) else image.exported_symbols
    names = {symbol.name for symbol in exported}
    if isinstance(image, lief.MachO.Binary):
        own = lief.MachO.LoadCommand.TYPE.ID_DYLIB  # LIEF also lists the command with the library's own name
        return {one.name for one in image.libraries if one.command != own}, {name.removeprefix("_") for name in names} - HEADERS
    return set(image.libraries), names


def check_linux(library: pathlib.Path, platform: Platform) -> str:
    shown = " ".join(output_of(sys.executable, "-m", "auditwheel", "show", platform.wheel).split())
    tag = re.search(r'consistent with the following platform tag: "manylinux_2_(\d+)_', shown)
    holds(tag and int(tag[1]) <= 17, f"auditwheel does not confirm {platform.tag}: {shown}")
    return f"auditwheel: manylinux_2_{tag[1]}"  # pyright: ignore


def check_windows(library: pathlib.Path, platform: Platform) -> str:
    shown = output_of(sys.executable, "-m", "delvewheel", "show", platform.wheel)
    holds("None" in shown.split("copied into the wheel")[1].split("not be copied")[0], f"delvewheel would add:\n{shown}")
    return "delvewheel: nothing to add"


def check_macos(library: pathlib.Path, platform: Platform) -> str:
    image = lief.parse(library)
    oldest, paths = image.build_version.minos, [one.path for one in image.rpaths]
    holds(
        image.header.cpu_type == lief.MachO.Header.CPU_TYPE.ARM64 and oldest[:2] == [11, 0], f"{library.name}: macOS {oldest}"
    )
    holds(paths == ["@loader_path"] * len(paths), f"{library.name} looks for libraries in {paths}")
    holds(image.has_code_signature, f"{library.name} has no signature: arm64 Macs load no such file")
    return "Mach-O: arm64, macOS 11.0, signed"


# The check for each system's wheel, and the libraries that every such system has.
SYSTEMS: dict[str, tuple[Callable[[pathlib.Path, Platform], str], str]] = {
    ".so": (check_linux, r"lib(c|m|dl|pthread)\.so\.\d|ld-linux.*"),
    ".dll": (check_windows, r"(KERNEL32|ntdll|bcryptprimitives|api-ms-win-crt-\w+-l1-1-0)\.dll"),
    ".dylib": (check_macos, r"/usr/lib/libSystem\.B\.dylib"),
}
FOR_ONNXRUNTIME = "RegisterCustomOps"  # onnxruntime looks for this name; no header declares it


def check_library(platform: Platform, library: pathlib.Path) -> str:
    check_system, usual = SYSTEMS[library.suffix]
    needed, exported = imports_and_exports(library)
    others = [name for name in needed if not re.fullmatch(usual, name, re.IGNORECASE)]
    holds(not others, f"{library.name} needs {others}")
    declared = re.findall(r"\b(?:mxd_|acl)\w+(?=\()", "".join(h.read_text() for h in library.parent.rglob("*.h")))
    functions = {name for name in exported if name.startswith(("mxd_", "acl"))}
    holds(functions and functions <= set(declared), f"undeclared functions are exported: {functions - set(declared)}")
    more = exported - functions
    holds(more == {FOR_ONNXRUNTIME}, f"{library.name} must export {FOR_ONNXRUNTIME} beside its functions; got {sorted(more)}")
    for_torch = library.with_name(library.name.replace("mx_driving", "mx_driving_torch"))
    beside = [name for name in imports_and_exports(for_torch)[0] if not re.fullmatch(usual, name, re.IGNORECASE)]
    holds(
        [pathlib.PurePath(name).name for name in beside] == [library.name], f"{for_torch.name} must need {library.name} alone"
    )
    facts = f"{check_system(library, platform)}; {check_bill(platform.wheel)}"
    return f"{facts}; imports {', '.join(sorted(needed))}; exports {len(exported)} functions"


def link(sources: str, platform: Platform, library: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Link a program of sources in tests/native against the library."""
    program = folder / ("program.exe" if library.suffix == ".dll" else "program")
    # without fused multiply-add, so that all processors compute the same inputs for a comparison
    flags = ["-std=c++17", "-O1", "-g0", "-ffp-contract=off"]
    library_flags = [f"-I{library.parent / 'include'}", f"-L{library.parent}", "-lmx_driving"]
    # Windows finds libraries beside the program; other systems need a path
    path = [] if library.suffix == ".dll" else [f"-Wl,-rpath,{library.parent}"]
    files = sorted((ROOT / "tests" / "native").glob(sources))
    output_of(ZIG, "c++", "-target", platform.target, *files, *flags, *library_flags, *path, "-o", program)
    return program


def run(platform: Platform, library: pathlib.Path, folder: pathlib.Path) -> str:
    program = link("[!f]*.cpp", platform, library, folder)
    if library.suffix == ".dylib":
        return "no: tests/native are linked, no Mac ran them"
    how, command = "directly", [program]
    if library.suffix == ".dll":
        shutil.copy(library, program.parent)
        how, command = "under " + output_of(WINE, "--version").strip(), [WINE, program]
    elif machine.machine() not in platform.target:
        how, command = "under qemu-user", ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", program]
    printed = output_of(*command).splitlines()
    passed = sum(line.strip().endswith(": passed") for line in printed)
    tests = len(re.findall(r'\{"\w+", \w+\}', (ROOT / "tests" / "native" / "main.cpp").read_text()))
    holds(passed == tests > 0, f"{passed} of {tests} native tests passed")
    isa = printed[0].strip()
    holds(isa.startswith("instruction set: ") and ("x86_64" not in platform.target or "baseline" not in isa), isa)
    said = f"{how}: {passed} of {tests} native tests, {isa}"
    if platform.target.startswith("x86_64-linux"):  # compare each instruction set of this machine with baseline
        said += "; " + output_of(link("compare/main.cpp", platform, library, folder), 0, CASES).splitlines()[-1]
        holds(said.endswith(" 0 findings"), f"tests/native/compare says {said!r}")
    return said


def row_of(name: str) -> dict[str, object]:
    platform = PLATFORMS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        with zipfile.ZipFile(platform.wheel) as wheel:
            wheel.extractall(folder)
        library = folder / "mx_driving" / platform.library
        check_inside(platform, folder)
        checked, ran = check_library(platform, library), run(platform, library, folder)
    return {
        "platform": name,
        "wheel": platform.wheel.name,
        "bytes": platform.wheel.stat().st_size,
        "built_by": "zig c++ " + output_of(ZIG, "version").strip(),
        "checked": checked,
        "run": ran,
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    names = sys.argv[1:] or list(PLATFORMS)
    output_of(sys.executable, "-m", "twine", "check", "--strict", *(ROOT / "dist").iterdir())
    with TABLE.open(newline="") as file:  # keep the rows of the other platforms, with their dates
        rows = {row["platform"]: dict(row) for row in csv.DictReader(file)}
    for name in names:
        rows[name] = row_of(name)
        print(*(f"{column}: {text}" for column, text in rows[name].items()), "", sep="\n", flush=True)
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows[name] for name in PLATFORMS if name in rows)


if __name__ == "__main__":
    main()
