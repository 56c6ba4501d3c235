"""The public interface changes only where CHANGELOG.md says so."""

from __future__ import annotations

import pathlib

import interface
import pytest

from mx_driving._dispatch.registered import REGISTERED

RECORDED = ["m: module", "m.f(a, b=1)", "m.K: class()", "m.K.__init__(self)"]


def test_every_change_of_the_interface_is_in_the_changelog():
    before, changes = interface.LISTING.read_text().splitlines(), interface.newest_changes(interface.CHANGES.read_text())
    missing = interface.unexplained(before, interface.listing(), changes)
    assert not missing, f"CHANGELOG.md's first section must name what changed; it says nothing of {missing}"


@pytest.mark.parametrize(
    ("now", "missing"),
    [
        (RECORDED, []),
        (["m: module", "m.f(a, b=2)", *RECORDED[2:]], ["m.f(a, b=1)", "m.f(a, b=2)"]),
        (RECORDED[:-1], ["m.K.__init__(self)"]),
        ([*RECORDED, "m.g()"], ["m.g()"]),
    ],
)
def test_what_is_not_said_is_found(now, missing):
    assert interface.unexplained(RECORDED, now, "- Something else.") == missing
    assert interface.unexplained(RECORDED, now, "- `f`, `K` and `g` are others.") == []


def test_schemas_are_those_of_earlier_releases():
    """Programs that torch.export or torch.jit.trace has saved call operators by their schemas."""
    file = pathlib.Path(__file__).parents[2] / "docs" / "support" / "schemas.txt"
    assert [str(registered.op._schema) for registered in REGISTERED.values()] == file.read_text().splitlines()
