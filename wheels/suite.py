"""The whole test suite against the wheel that fits this machine, installed for this Python: `make test-wheel`.

The tests come from this folder, the package from the wheel. For check.py it leaves a note of what ran.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import xml.etree.ElementTree as tree

from platforms import PLATFORMS, ROOT, SUITE, sha256

import mx_driving


def main() -> None:
    inside = pathlib.Path(sysconfig.get_paths()["platlib"])
    if not pathlib.Path(mx_driving.__file__).is_relative_to(inside):
        raise SystemExit(f"suite.py: mx_driving is imported from {mx_driving.__file__}, not from an installed wheel")
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", f"--junit-xml={report}", *sys.argv[1:]]
        done = subprocess.run(command, cwd=ROOT, check=False).returncode
        counts = tree.parse(report).getroot()[0].attrib
    if done:
        raise SystemExit(done)
    passed = int(counts["tests"]) - int(counts["skipped"])
    wheel = PLATFORMS["linux-x86_64"].wheel
    if not sys.argv[1:] and sysconfig.get_platform() == "linux-x86_64":
        sentence = f"installed, the whole suite: {passed} tests passed, {counts['skipped']} skipped"
        SUITE.write_text(json.dumps({"sha256": sha256(wheel), "sentence": sentence}))


if __name__ == "__main__":
    main()
