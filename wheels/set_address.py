"""Write the repository's address into pyproject.toml and README.md before a release is built:

    python wheels/set_address.py https://host/owner/name COMMIT

pyproject.toml gets the project's addresses. README's relative links become absolute links to the commit, because a registry
shows README without the other files. The sources contain no address, so that a fork's release points to the fork.
"""

from __future__ import annotations

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
URLS = """[project.urls]
Homepage = "{address}"
Documentation = "{address}/blob/{commit}/docs/index.md"
Issues = "{address}/issues"
Changelog = "{address}/blob/{commit}/CHANGELOG.md"

"""


def make_links_absolute(text: str, address: str, commit: str) -> str:
    """Return Markdown whose links to files lead to the repository; pictures lead to the files' raw bytes."""
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{address}/raw/{commit}/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{address}/blob/{commit}/", text)


def add_urls(text: str, address: str, commit: str) -> str:
    """Return pyproject.toml with the addresses that a registry shows beside a project."""
    return text.replace("[project.scripts]\n", URLS.format(address=address, commit=commit) + "[project.scripts]\n", 1)


def main() -> None:
    address, commit = sys.argv[1:]
    for name, change in (("pyproject.toml", add_urls), ("README.md", make_links_absolute)):
        file = ROOT / name
        file.write_text(change(file.read_text(), address.rstrip("/"), commit))


if __name__ == "__main__":
    main()
