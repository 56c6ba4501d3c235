"""Private words stay out of code, comments and pages: the field has a word for each of these."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
INSTEAD = {
    r"doors?": "public function, entry point, binding",
    r"turned": "computed; swapped; projected",
    r"nowhere": "the zero row; off the map",
    r"circles": "reference cycles; cyclic imports",
    r"AHEAD": "software pipelining",
    r"shares? of (?:a|the|each) (?:row|corner|sample)|corners\.share|shares\(": "coefficient",
    r"(?:is|are|was|be) told": "is given, reads",
    r"speaks?": "returns; prints",
    r"yardstick": "error bound",
}
FOLDERS = ("src", "native", "docs", "examples", "benchmarks/*.py", "README.md", "CONTRIBUTING.md")
TEXTS = sorted(
    file
    for folder in FOLDERS
    for found in ROOT.glob(folder)
    for file in (found.rglob("*") if found.is_dir() else [found])
    if file.suffix in (".py", ".h", ".cpp", ".md") and "_generated" not in file.parts and "_build" not in file.parts
)


def test_there_is_something_to_read():
    assert len(TEXTS) > 200


@pytest.mark.parametrize("word", INSTEAD)
def test_no_private_word(word):
    pattern = re.compile(rf"\b(?:{word})\b" if word[-1] != "(" and not word.endswith(r"\(") else rf"\b(?:{word})")
    places = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in TEXTS
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not places, f"write {INSTEAD[word]}"
