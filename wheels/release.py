"""Whether a release can be made of these sources: `make release-check`. A line for each step says what it did.

    python wheels/release.py [--quick] [--keep-going]

--quick leaves out the steps that build; they need the packages that docs/maintaining.md names, and time. What only a registry
or GitHub can do (attestations, the trusted publisher) is not checked.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))


class Failed(Exception):
    pass


def holds(condition: object, sentence: str) -> None:
    if not condition:
        raise Failed(sentence)


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def found(name: str, pattern: str) -> str:
    match = re.search(pattern, text_of(name), re.MULTILINE)
    holds(match, f"{name} must have {pattern}")
    return match[1]  # pyright: ignore


def version_of_the_package() -> str:
    tree = ast.parse(text_of("src/mx_driving/__init__.py"))
    assigned = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__version__"]
    return ast.literal_eval(assigned[0].value)


def check_version() -> str:
    versions = {
        "pyproject.toml": found("pyproject.toml", r'^version = "(.+)"'),
        "CITATION.cff": found("CITATION.cff", r"^version: (.+)"),
        "CHANGELOG.md": found("CHANGELOG.md", r"^## (\S+)"),
        "mx_driving.__version__": version_of_the_package(),
    }
    holds(len(set(versions.values())) == 1, f"versions must be the same; got {versions}")
    return f"{next(iter(versions.values()))} in {', '.join(versions)}"


def check_changelog() -> str:
    section = text_of("CHANGELOG.md").split("\n## ")[1]
    lines = sum(line.startswith("- ") for line in section.splitlines())
    holds(lines, "CHANGELOG.md's first section must say what changed")
    return f"{lines} lines in the first section, {section.split()[0]}"


def check_interface() -> str:
    import interface

    now, recorded = interface.listing(), interface.LISTING.read_text().splitlines()
    different = sorted(set(now) ^ set(recorded))
    holds(not different, f"docs/support/interface.txt is not of these sources, `make interface` records it: {different}")
    return f"{len(now)} names, as docs/support/interface.txt has them"


def check_actions() -> str:
    uses = []
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for name, version in re.findall(r"uses: (\S+?)@(\S+)", file.read_text()):
            holds(re.fullmatch(r"[0-9a-f]{40}", version), f"{file.name} must pin {name} by commit; got {version}")
            uses.append(name)
    holds(uses, "workflows must use an action")
    return f"{len(uses)} uses, all by commit: {', '.join(sorted(set(uses)))}"


def check_measurements() -> str:
    """README's table is measured at a commit, and not between two."""
    name = found("docs/tables.py", r'^BENCH = "(.+?)"')
    rows = text_of(f"benchmarks/results/{name}").splitlines()[1:]
    commits = {commit for row in rows for commit in re.findall(r"commit ([\w-]+)", row)}
    holds(
        commits and not any(c.endswith("-dirty") for c in commits), f"{name} must be of a clean commit; got {sorted(commits)}"
    )
    return f"{len(rows)} rows of {name}, at {', '.join(sorted(commits))}"


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def check_clean() -> str:
    changed = git("status", "--porcelain")
    holds(not changed, f"everything must be committed; got\n{changed}")
    return f"nothing to commit at {git('log', '-1', '--format=%h')}"


def made(*words: str) -> Callable[[], str]:
    """A step that calls make; the last line that it said."""

    def run() -> str:
        command = ["make", "-C", str(ROOT), "--no-print-directory", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = (done.stdout + done.stderr).strip().splitlines()
        holds(done.returncode == 0, f"make {' '.join(words)} failed:\n" + "\n".join(lines[-15:]))
        printed = done.stdout.strip().splitlines() or ["(nothing)"]  # warnings are not what it came to
        return printed[-1].strip()

    return run


QUICK = {
    "version": check_version,
    "changelog": check_changelog,
    "interface": check_interface,
    "actions": check_actions,
    "measurements": check_measurements,
    "commit": check_clean,
}
BUILDING = {
    "tests": made("test"),
    "sanitizers": made("sanitize"),
    "comparison": made("compare"),
    "wheels, twice": made("wheels", "AGAIN=1"),
    "wheel installed": made("test-wheel"),
    "wheels": made("check-wheels"),  # twine, SBOM, imports, exports, native tests and comparison
    "AVX-512": made("test-avx512"),
    "aarch64": made("aarch64"),
    "documents": made("docs"),
}


def run_step(name: str, step: Callable[[], str]) -> bool:
    start = time.monotonic()
    try:
        said, passed = step(), True
    except Failed as why:
        said, passed = str(why), False
    print(f"{'passed' if passed else 'FAILED'}  {name}: {said} ({time.monotonic() - start:.0f} s)", flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether a release can be made of these sources")
    parser.add_argument("--quick", action="store_true", help="only the steps that build nothing")
    parser.add_argument("--keep-going", action="store_true", help="go on after a step that failed")
    options = parser.parse_args()
    passed = []
    steps = QUICK if options.quick else {**QUICK, **BUILDING}
    for name, step in steps.items():
        passed.append(run_step(name, step))
        if not (passed[-1] or options.keep_going):
            break
    if not all(passed):
        raise SystemExit(1)
    print(f"{len(passed)} steps passed; attestations are made by publish.yml, and the registry and GitHub check them")


if __name__ == "__main__":
    main()
