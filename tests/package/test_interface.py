"""The public interface changes only where CHANGELOG.md says so."""

import pathlib

import interface

from mx_driving._dispatch.registered import REGISTERED


def test_every_change_of_the_interface_is_in_the_changelog():
    before, changes = interface.LISTING.read_text().splitlines(), interface.newest_changes(interface.CHANGES.read_text())
    missing = interface.unexplained(before, interface.listing(), changes)
    assert not missing, f"CHANGELOG.md's first section must name what changed; it says nothing of {missing}"


def test_schemas_are_those_of_earlier_releases():
    """Programs that torch.export or torch.jit.trace has saved call operators by their schemas."""
    file = pathlib.Path(__file__).parents[2] / "docs" / "support" / "schemas.txt"
    assert [str(registered.op._schema) for registered in REGISTERED.values()] == file.read_text().splitlines()
