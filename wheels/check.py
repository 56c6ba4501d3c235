"""Checks every wheel in dist, from the wheel's own file, and writes docs/support/wheels.csv: `make check-wheels`.

    python wheels/check.py [PLATFORM ...]

Looks at each: size, what is inside, what the library imports and exports, the oldest system. Then it links tests/native against
the library and runs that: here, under qemu-user (aarch64), under Wine (Windows). Nothing runs a Mac's files on Linux: that
program is linked, and the row says that it did not run. Needs Debian's qemu-user, libc6-arm64-cross and wine64.
"""

from __future__ import annotations

import csv
import datetime
import json
import pathlib
import platform as machine
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable

import pefile
from elftools.elf.elffile import ELFFile
from macholib import mach_o
from macholib.MachO import MachO
from macholib.SymbolTable import SymbolTable
from make import ZIG, environment
from platforms import PLATFORMS, ROOT, SUITE, Platform, sha256
from sbom import check_bill

TABLE = ROOT / "docs" / "support" / "wheels.csv"
COLUMNS = ["platform", "wheel", "bytes", "built_by", "checked", "run", "date"]
MOST_BYTES = 2_000_000
CASES = 2500  # of tests/native/compare, each a call and its gradients
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


def for_torch(platform: Platform) -> str:
    """The name of the library that registers the operators with PyTorch."""
    return platform.library.replace("mx_driving", "mx_driving_torch")


def check_inside(platform: Platform, folder: pathlib.Path) -> None:
    """The library and the one that registers it with PyTorch, no floor, no leftovers."""
    holds(platform.wheel.stat().st_size < MOST_BYTES, f"{platform.wheel.name} has 2 MB or more")
    allowed = {".py", ".h", ".cpp", ".cmake", ".typed", ".lib", ".html", ".css", ".js"}
    others = {file.name for file in (folder / "mx_driving").rglob("*") if file.is_file() and file.suffix not in allowed}
    holds(others == {platform.library, for_torch(platform)}, f"{platform.wheel.name} holds {others}")


# ---- what a library imports and exports; the oldest system


def elf(library: pathlib.Path, platform: Platform) -> tuple[set[str], set[str], str]:
    with library.open("rb") as file:
        image = ELFFile(file)
        needed = {tag.needed for tag in image.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        symbols = image.get_section_by_name(".dynsym").iter_symbols()
        exported = {s.name for s in symbols if s.name and s["st_shndx"] != "SHN_UNDEF"}
        versions = [aux.name for _, auxes in image.get_section_by_name(".gnu.version_r").iter_versions() for aux in auxes]
    holds(all(v.startswith("GLIBC_") for v in versions), f"{library.name} needs {versions}: a C++ runtime that is not inside")
    shown = " ".join(output_of(sys.executable, "-m", "auditwheel", "show", platform.wheel).split())
    tag = re.search(r'consistent with the following platform tag: "(\w+)"', shown)
    expected = platform.tag.replace("manylinux2014", "manylinux_2_17")
    holds(tag and _glibc(tag[1]) <= _glibc(expected), f"auditwheel does not confirm {platform.tag}: {shown}")
    newest = max(versions, key=lambda v: [int(n) for n in re.findall(r"\d+", v)])
    return needed, exported, f"auditwheel: {tag[1]}; newest symbol {newest}"  # pyright: ignore


def _glibc(tag: str) -> list[int]:
    return [int(number) for number in tag.removeprefix("manylinux_").split("_")[:2]]


def pe(library: pathlib.Path, platform: Platform) -> tuple[set[str], set[str], str]:
    image = pefile.PE(str(library))
    needed = {entry.dll.decode() for entry in image.DIRECTORY_ENTRY_IMPORT}
    exported = {symbol.name.decode() for symbol in image.DIRECTORY_ENTRY_EXPORT.symbols}
    shown = output_of(sys.executable, "-m", "delvewheel", "show", platform.wheel)
    holds("None" in shown.split("copied into the wheel")[1].split("not be copied")[0], f"delvewheel would add:\n{shown}")
    return needed, exported, "delvewheel: nothing to add"


def mach(library: pathlib.Path, _: Platform) -> tuple[set[str], set[str], str]:
    image = MachO(str(library))
    (header,) = image.headers
    needed, oldest, signed = set(), "", False
    for command, body, text in header.commands:
        if command.cmd == mach_o.LC_LOAD_DYLIB:
            needed.add(text.rstrip(b"\0").decode())
        elif command.cmd == mach_o.LC_BUILD_VERSION:
            oldest = f"{body.minos >> 16}.{body.minos >> 8 & 255}"
        elif command.cmd == mach_o.LC_RPATH:
            holds(text.rstrip(b"\0") == b"@loader_path", f"{library.name} looks for libraries in {text!r}")
        signed = signed or command.cmd == mach_o.LC_CODE_SIGNATURE
    holds(header.header.cputype == 0x100000C and oldest == "11.0", f"{library.name} is for macOS {oldest}")
    holds(signed, f"{library.name} has no signature: arm64 Macs load no such file")
    symbols = SymbolTable(image).nlists
    defined = {name.decode() for entry, name in symbols if entry.n_type & mach_o.N_EXT and entry.n_type & mach_o.N_TYPE}
    exported = {name.removeprefix("_") for name in defined} - {"_mh_dylib_header", "__dso_handle", "_dso_handle"}
    return needed, exported, "Mach-O: arm64, macOS 11.0, signed"


READERS: dict[str, Callable[[pathlib.Path, Platform], tuple[set[str], set[str], str]]] = {
    ".so": elf,
    ".dll": pe,
    ".dylib": mach,
}
# What every system of the kind has.
SYSTEMS = {
    ".so": r"lib(c|m|dl|pthread)\.so\.\d|ld-linux.*",
    ".dll": r"(KERNEL32|ntdll|bcryptprimitives|api-ms-win-crt-\w+-l1-1-0)\.dll",
    ".dylib": r"/usr/lib/libSystem\.B\.dylib",
}
FOR_ONNXRUNTIME = "RegisterCustomOps"  # the name that it looks for; no header declares it


def strangers(needed: set[str], library: pathlib.Path) -> list[str]:
    return [name for name in needed if not re.fullmatch(SYSTEMS[library.suffix], name, re.IGNORECASE)]


def check_library(platform: Platform, library: pathlib.Path) -> str:
    needed, exported, facts = READERS[library.suffix](library, platform)
    holds(not strangers(needed, library), f"{library.name} needs {strangers(needed, library)}")
    declared = re.findall(r"\b(?:mxd_|acl)\w+(?=\()", "".join(h.read_text() for h in library.parent.rglob("*.h")))
    functions = {name for name in exported if name.startswith(("mxd_", "acl"))}
    holds(functions and functions <= set(declared), f"undeclared functions are exported: {functions - set(declared)}")
    more = exported - functions
    holds(more == {FOR_ONNXRUNTIME}, f"{library.name} must export {FOR_ONNXRUNTIME} beside its functions; got {sorted(more)}")
    needs, _, _ = READERS[library.suffix](library.with_name(for_torch(platform)), platform)
    beside = [pathlib.PurePath(name).name for name in strangers(needs, library)]
    holds(beside == [platform.library], f"{for_torch(platform)} must need {platform.library} alone; got {beside}")
    return f"{facts}; {check_bill(platform.wheel)}; imports {', '.join(sorted(needed))}; exports {len(exported)} functions"


# ---- tests/native against the library


def link(name: str, platform: Platform, library: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    native = ROOT / "tests" / "native"
    shared = [file for file in (native / "compare").glob("*.cpp") if file.name != "main.cpp"]
    program_sources = {"native_tests": native.glob("[!f]*.cpp"), "compare": [native / "compare" / "main.cpp"]}
    program = folder / (name + (".exe" if library.suffix == ".dll" else ""))
    sources = sorted([*program_sources[name], *shared])
    # inputs of a comparison must not depend on a processor that multiplies and adds at once
    flags = [
        "-std=c++17",
        "-O1",
        "-g0",
        "-ffp-contract=off",
        f"-I{library.parent / 'include'}",
        f"-L{library.parent}",
        "-lmx_driving",
    ]
    # Windows looks beside the program, the others where they are told
    path = [] if library.suffix == ".dll" else [f"-Wl,-rpath,{library.parent}"]
    output_of(ZIG, "c++", "-target", platform.target, *sources, *flags, *path, "-o", program)
    return program


def best_isa(platform: Platform) -> str:
    """What this machine's processor has, by Linux's own list."""
    if "x86_64" not in platform.target:
        return "baseline"
    flags = set(re.findall(r"\w+", re.search(r"^flags.*", pathlib.Path("/proc/cpuinfo").read_text(), re.M)[0]))  # pyright: ignore
    wanted = {"avx2": {"avx2", "fma", "f16c"}, "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}}
    return next((name for name in ("avx512", "avx2") if wanted[name] <= flags), "baseline")


def run(platform: Platform, library: pathlib.Path, folder: pathlib.Path) -> str:
    program = link("native_tests", platform, library, folder)
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
    isa = f"instruction set: {best_isa(platform)}"
    holds(isa in (line.strip() for line in printed), f"the library does not say {isa!r}: {printed[:1]}")
    compared = compare(platform, library, folder) if platform.target.startswith("x86_64-linux") else ""
    return f"{how}: {passed} of {tests} native tests, {isa}{compared}"


def compare(platform: Platform, library: pathlib.Path, folder: pathlib.Path) -> str:
    """Random calls on each instruction set that this machine has, against baseline."""
    said = output_of(link("compare", platform, library, folder), 0, CASES).splitlines()[-1]
    holds(said.endswith(" 0 findings"), f"tests/native/compare says {said!r}")
    return "; " + said


def suite() -> str:
    """What `make test-wheel` wrote, if it ran for this very file."""
    ran = json.loads(SUITE.read_text()) if SUITE.exists() else {}
    return "; " + ran["sentence"] if ran.get("sha256") == sha256(PLATFORMS["linux-x86_64"].wheel) else ""


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
        "run": ran + (suite() if name == "linux-x86_64" else ""),
        "date": datetime.date.today().isoformat(),
    }


def recorded() -> dict[str, dict[str, object]]:
    """The rows of before. Those of platforms that are not named stay, with their dates."""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="") as file:
        return {row["platform"]: dict(row) for row in csv.DictReader(file)}


def main() -> None:
    names = sys.argv[1:] or list(PLATFORMS)
    output_of(sys.executable, "-m", "twine", "check", "--strict", *(ROOT / "dist").iterdir())
    rows = recorded()
    for name in names:
        rows[name] = row_of(name)
        print(*(f"{column}: {text}" for column, text in rows[name].items()), "", sep="\n", flush=True)
    TABLE.parent.mkdir(exist_ok=True)
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows[name] for name in PLATFORMS if name in rows)


if __name__ == "__main__":
    main()
