"""Check without building whether these sources can be released.

`make release-check` runs this program first, and then all builds and tests. It does not check what only a registry or GitHub
can do: attestations and the trusted publisher.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))


def holds(condition: object, message: str) -> None:
    if not condition:
        raise SystemExit(f"release.py: {message}")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def match_in(name: str, pattern: str) -> str:
    match = re.search(pattern, read(name), re.MULTILINE)
    holds(match, f"{name} must have {pattern}")
    return match[1]  # pyright: ignore


def check_version() -> str:
    versions = {
        "pyproject.toml": match_in("pyproject.toml", r'^version = "(.+)"'),
        "CITATION.cff": match_in("CITATION.cff", r"^version: (.+)"),
        "CHANGELOG.md": match_in("CHANGELOG.md", r"^## (\S+)"),
        "mx_driving.__version__": match_in("src/mx_driving/__init__.py", r'^__version__ = "(.+)"'),
    }
    holds(len(set(versions.values())) == 1, f"versions must be the same; got {versions}")
    return f"{next(iter(versions.values()))} in {', '.join(versions)}"


def check_changelog() -> str:
    section = read("CHANGELOG.md").split("\n## ")[1]
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
    """Check that README's times were measured at commits, without uncommitted changes."""
    page = read("docs/benchmark_tables.py")
    commits = {}
    for name in re.findall(r'^(?:BENCH|MODULES_BY_MODE|BY_MODE) = "(.+?)"', page, re.MULTILINE):
        commits[name] = sorted(set(re.findall(r"commit ([\w-]+)", read(f"benchmarks/results/{name}"))))
        clean = commits[name] and not any(commit.endswith("-dirty") for commit in commits[name])
        holds(clean, f"{name} must be of a clean commit; got {commits[name]}")
    holds(len(commits) == 3, f"README's numbers must have three files; got {list(commits)}")
    return "; ".join(f"{name} at {', '.join(of)}" for name, of in commits.items())


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def check_clean() -> str:
    changed = git("status", "--porcelain")
    holds(not changed, f"everything must be committed; got\n{changed}")
    return f"nothing to commit at {git('log', '-1', '--format=%h')}"


def main() -> None:
    for check in (check_version, check_changelog, check_interface, check_actions, check_measurements, check_clean):
        print(f"{check.__name__}: {check()}", flush=True)


if __name__ == "__main__":
    main()
