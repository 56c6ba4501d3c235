"""A release names the repository that builds it, and its README has no link that only a clone can follow."""

import importlib.util
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
ADDRESS, COMMIT = "https://example.org/owner/name", "abc123"


def load_program():
    spec = importlib.util.spec_from_file_location("set_address", ROOT / "wheels" / "set_address.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_links_lead_to_the_repository():
    text = (ROOT / "README.md").read_text()
    absolute = load_program().make_links_absolute(text, ADDRESS, COMMIT)
    before, after = (re.findall(r"\]\(([^)]+)\)", t) for t in (text, absolute))
    assert all(link.startswith(("https:", "#")) for link in after)
    files = [link for link in after if link.startswith(ADDRESS)]
    assert len(files) == sum(not link.startswith(("https:", "#")) for link in before) > 0
    for link in files:
        assert (ROOT / re.sub(rf"{ADDRESS}/(?:blob|raw)/{COMMIT}/", "", link).split("#")[0]).exists()


def test_pyproject_names_the_repository_once():
    text = load_program().add_urls((ROOT / "pyproject.toml").read_text(), ADDRESS, COMMIT)
    assert text.count("[project.urls]") == 1
    assert text.count(ADDRESS) == 4
