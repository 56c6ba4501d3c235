"""`mx-driving forms FOLDER`: files that cannot be imported are reported, and what the files print or end stays theirs."""

import inspect
import json
import sys

import pytest
from attention_modules import plain_core

MARKS = "# sampling_offsets, attention_weights\n"
# Other tests make plain_core known. A factor of 1 makes it unknown, so that it is tried.
TRIED = inspect.getsource(plain_core).replace("return total", "return 1.0 * total")
CORE = f"import sys\nimport torch.nn.functional as F\n{MARKS}{TRIED}"
SPEAKS = CORE.replace("    bs, _,", "    print('printed by the core')\n    bs, _,") + "print('printed at the import')\n"
FOLDER = {
    "speaks": SPEAKS,
    "needs_a_package": f"{MARKS}from no_such_package.ops import core\n",
    "ends": f"{MARKS}import sys\nsys.exit(3)\n",
    "parses": f"{MARKS}import argparse\nargparse.ArgumentParser().add_argument('--weights')\n"
    "parser = argparse.ArgumentParser()\nparser.add_argument('config')\nparser.parse_args()\n",
    "is_not_python": f"{MARKS}print 'Python 2'\n",
    "has_no_core": "raise RuntimeError('a file without a core is not imported')\n",
}
REASONS = {
    "needs_a_package": "it cannot be imported: ModuleNotFoundError: No module named 'no_such_package'",
    "ends": "it cannot be imported: SystemExit: 3",
    "parses": "it cannot be imported: SystemExit: 2",
    "is_not_python": "it cannot be imported: SyntaxError: Missing parentheses in call to 'print'",
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write Python files into a folder of their own; forget afterwards that they were imported."""
    folder = tmp_path / "of_a_user"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path])
    written = []

    def write(files):
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        written.extend(files)
        return folder

    yield write
    for name in written:
        sys.modules.pop(name, None)


def test_files_that_cannot_be_imported_are_reported_and_the_others_listed(mx, write):
    status, printed, errors = mx("forms", write(FOLDER))
    first, *unread = printed.splitlines()
    assert status == 1
    assert first.split(",")[0] == "tried   speaks.plain_core: rows_split"
    assert len(unread) == len(REASONS)
    for name, reason in REASONS.items():
        assert any(line.startswith(f"unread   {name}: {reason}") for line in unread), (name, unread)
    assert "printed at the import" in errors
    assert "printed by the core" in errors


def test_json_is_the_only_thing_on_standard_output(mx, write):
    status, printed, _ = mx("forms", write(FOLDER), "--json")
    report = json.loads(printed)
    assert (status, report["right"], set(report["unread"])) == (1, False, set(REASONS))
    assert [form["name"] for form in report["forms"]] == ["speaks.plain_core"]


def test_a_folder_whose_files_can_be_imported_ends_with_status_0(mx, write):
    assert mx("forms", write({"speaks": SPEAKS, "has_no_core": FOLDER["has_no_core"]}))[0] == 0


def test_a_core_that_ends_the_process_is_refused_by_its_trial(write):
    from mx_driving._patch._patch import survey

    ends = CORE.replace("    bs, _,", "    sys.exit(5)\n    bs, _,")
    findings, unread = survey(write({"a_core_that_ends": ends}))
    assert ([finding.state for finding in findings], unread) == (["unknown"], {})
