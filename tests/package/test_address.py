"""A release names the repository that builds it, and its README has no link that only a clone can follow."""

import pathlib
import re

from programs import load_file

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "wheels" / "set_address.py"
ADDRESS, COMMIT = "https://example.org/owner/name", "abc123"


def test_readme_links_lead_to_the_repository():
    text = (ROOT / "README.md").read_text()
    absolute = load_file("set_address", PROGRAM).make_links_absolute(text, ADDRESS, COMMIT)
    before, after = (re.findall(r"\]\(([^)]+)\)", t) for t in (text, absolute))
    assert all(link.startswith(("https:", "#")) for link in after)
    files = [link for link in after if link.startswith(ADDRESS)]
    assert len(files) == sum(not link.startswith(("https:", "#")) for link in before) > 0
    for link in files:
        assert (ROOT / re.sub(rf"{ADDRESS}/(?:blob|raw)/{COMMIT}/", "", link).split("#")[0]).exists()


def test_pyproject_names_the_repository_once():
    text = load_file("set_address", PROGRAM).add_urls((ROOT / "pyproject.toml").read_text(), ADDRESS, COMMIT)
    assert text.count("[project.urls]") == 1
    assert text.count(ADDRESS) == 4
