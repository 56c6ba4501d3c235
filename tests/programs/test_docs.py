"""README and pages: Python blocks run as they stand, links and figures hold, nothing stands twice, the site builds."""

from __future__ import annotations

import doctest
import importlib
import io
import pathlib
import re
import socket
import tokenize

import pytest
import torch
import torch.distributed
from programs import python

import mx_driving
from mx_driving import _needs
from mx_driving._patch import _patch

ROOT = pathlib.Path(__file__).parents[2]
SOURCE = ROOT / "src"
DOCS = ROOT / "docs"
README = ROOT / "README.md"
CHINESE = ROOT / "README.zh-CN.md"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (README, *PAGES)}
FENCE = re.compile(r"^(```+)(.*?)\n(.*?)^\1$", flags=re.MULTILINE | re.DOTALL)

DOCTESTED = [
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((SOURCE / "mx_driving").rglob("*.py"))
    if re.search(r"^\s*>>> ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
]


@pytest.mark.parametrize("module", DOCTESTED)
def test_doctests(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def test_every_door_has_a_doctest():
    doors = ("multi_scale_deformable_attn", "npu_deformable_aggregation", "geometric_kernel_attention")
    assert {f"mx_driving.ops.{name}" for name in doors} <= set(DOCTESTED)
    assert len(DOCTESTED) >= 11


def fences(text: str, language: str) -> list[str]:
    return [body for _, info, body in FENCE.findall(text) if info == language]


SNIPPETS = [
    pytest.param(page, snippet, id=f"{page}-{number}")
    for page, text in TEXTS.items()
    for number, snippet in enumerate(fences(text, "python"), 1)
]


def test_every_python_block_runs():
    """No block names its language in another way: the tests would not run it."""
    for page, text in TEXTS.items():
        assert len(re.findall(r"^ *[`~]{3,} *(?:\{\S+ *)?py", text, flags=re.MULTILINE)) == len(fences(text, "python")), page
    assert len(fences(TEXTS["README.md"], "python")) >= 2
    for operator in mx_driving.backends()["cpu"]:
        assert fences(TEXTS[f"docs/{operator}.md"], "python")


@pytest.mark.parametrize("page", [page for page in TEXTS if page != "README.md"])
def test_code_fits_its_column(page):
    """A hundred characters are what a page shows of a line without scrolling."""
    for _, info, body in FENCE.findall(TEXTS[page]):
        assert "{math}" in info or max(map(len, body.splitlines()), default=0) <= 100


def a_detector_and_a_photograph() -> None:
    """What the pages would download: a small Deformable DETR with random weights, saved under the name they ask for."""
    import detectors

    detectors.saved(pathlib.Path("SenseTime/deformable-detr"), pathlib.Path("street.jpg"))


PREPARED = dict.fromkeys(("docs/models.md", "docs/training.md"), a_detector_and_a_photograph)


@pytest.fixture
def place_to_run(tmp_path, monkeypatch):
    """A folder of its own, and the environment that torchrun gives a single process."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("place_to_run", "quick_packages")
@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_snippets_run(page, snippet):
    packages = {"onnxscript": "onnx.export", "transformers": "transformers", "mmcv": "from mmcv", "kernels": "import kernels"}
    for needed, mark in packages.items():
        if mark in snippet:
            pytest.importorskip(needed)
    if "onnx.export" in snippet:
        import quick_exports  # noqa: F401
    if "opset_version=20" in snippet and (sentence := _needs.lacks("An ONNX file of opset 20")):
        pytest.skip(sentence)
    if "from_pretrained" in snippet:
        PREPARED[page]()
    if "compat.install" in snippet:  # must come before imports that other tests may have made
        python("-W", "ignore", "-c", snippet)
        return
    exec(compile(snippet, page, "exec"), {"__name__": "__main__"})  # older torch.compile imports it
    assert not _patch._changes, "a snippet must give back what it patches"


def pieces(text: str) -> set[str]:
    """Blocks of code, paragraphs, and sentences of some length, without their line breaks. Headings may be alike."""
    code = [" ".join(body.split()) for _, _, body in FENCE.findall(text)]
    parts = re.split(r"\n\s*\n", FENCE.sub("", text))
    paragraphs = [" ".join(part.split()) for part in parts if not part.startswith("#")]
    sentences = [s for part in paragraphs if not part.startswith("|") for s in re.split(r"(?<=[.:]) ", part)]
    return {part for part in (*code, *paragraphs) if len(part) > 40} | {s for s in sentences if len(s) > 60}


def test_no_paragraph_stands_twice():
    seen: dict[str, str] = {}
    for page, text in TEXTS.items():
        for piece in pieces(text):
            assert piece not in seen, f"{page} and {seen[piece]}: {piece}"
            seen[piece] = page


def anchors(text: str) -> set[str]:
    """The anchors that GitHub and MyST give the headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    for link in LINK.findall(FENCE.sub("", TEXTS[page])):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.is_file(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


def test_every_page_is_in_the_readme_or_generated():
    linked = {link for link in LINK.findall(TEXTS["README.md"]) if link.startswith("docs/")}
    assert {page for page in TEXTS if page.startswith("docs/")} - linked == {
        "docs/index.md",
        "docs/api.md",
        "docs/changelog.md",
        "docs/maintaining.md",  # CONTRIBUTING leads there
    }


def test_the_readme_is_short():
    assert len(TEXTS["README.md"].splitlines()) <= 130


def outline(text: str) -> list[object]:
    """What two languages share: levels of headings, links, code, and the numbers and names of tables' cells."""
    links = sorted(link for link in LINK.findall(text) if not link.startswith("README"))
    levels = re.findall(r"^(#+) ", FENCE.sub("", text), flags=re.MULTILINE)
    indented = re.findall(r"^    .*$", FENCE.sub("", text), flags=re.MULTILINE)
    rows = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    figures = re.findall(r"\d+(?:\.\d+)?", "\n".join(line for line in text.splitlines() if line.startswith("|")))
    return [levels, links, [body for _, _, body in FENCE.findall(text)], indented, rows, figures]


def test_the_chinese_readme_says_the_same():
    for here, there in zip(outline(TEXTS["README.md"]), outline(CHINESE.read_text(encoding="utf-8")), strict=True):
        assert here == there


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("tables")


def test_the_readmes_figures_are_those_of_the_files(tables):
    """Rows of whole models, and of the operators alone."""
    measured = tables.by_implementation("forward")
    found = re.findall(r"^\| (.+) \| (\S+) ms \| (\S+) ms \| (\S+) \|$", TEXTS["README.md"], flags=re.MULTILINE)
    assert len(found) == 3
    for name, ours, theirs, speed_up in found:
        ratio = float(measured[name]["plain torch"]["times ours"])
        expected = [tables.milliseconds(measured[name][who]) for who in ("mx_driving", "plain torch")]
        assert [ours, theirs, speed_up] == [*expected, f"{ratio:.0f}"]
    date = measured[found[0][0]]["mx_driving"]["machine"].partition(",")[0]
    assert date in TEXTS["README.md"]
    whole = {row["model"]: row for row in tables.read(tables.MODELS)}
    rows = re.findall(r"^\| (.+) \| (\S+) s \| (\S+) s \| (\S+) \|$", TEXTS["README.md"], flags=re.MULTILINE)
    assert len(rows) >= 4
    for name, *figures in rows:
        before, after = (f"{float(whole[name][f'whole {when} ms']) / 1000:.2f}" for when in ("before", "modules"))
        assert figures == [before, after, whole[name]["whole speed-up"]]
    assert all(whole[name]["machine"].partition(",")[0] in TEXTS["README.md"] for name, *_ in rows)


def test_every_public_name_has_an_entry():
    entries = "".join(file.read_text(encoding="utf-8") for file in (DOCS / "api").glob("*.md"))
    missing = [name for name in mx_driving.__all__ if name != "ops" and not re.search(rf"\b{name}\b", entries)]
    assert not missing


def test_what_is_cited_is_this_version():
    assert f"\nversion: {mx_driving.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_pages_draw_the_tables_there_are(tables):
    included = {name for text in TEXTS.values() for name in re.findall(r"\{include\} _generated/(\w+)\.md", text)}
    assert included == set(tables.TABLES)
    assert "9 of the 15 rows gain 6 % or less" in tables.whole_models()


def test_models_of_libraries_on_the_page(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.libraries() == tables.NOT_YET
    header = "library,model,replaced,difference,off,before ms,after ms,speed-up,rounds,onnx,machine"
    rows = ("a 1,b,Core,1e-16,0,12.5,10.0,1.25,7,yes,m", "a 1,c,Core,1e-15,0,9.9,9.0,1.1,7,no: it has a loop,m")
    (tmp_path / "libraries.csv").write_text("\n".join([header, *rows]))
    first, second, _, refused, _, made = tables.libraries().splitlines()[2:]
    assert first == "| a 1 | b | Core | 1e-16 | 12.5 | 10.0 | 1.25 | yes |"
    assert second == "| a 1 | c | Core | 1e-15 | 9.9 | 9.0 | 1.1 | no |"
    assert refused == "c in ONNX: it has a loop."
    assert made == "*m*"


def test_no_recorded_model_is_slower_when_patched(tables):
    """Within 3 %, which other work on a machine moves; GroundingDINO samples in its encoder."""
    if not (tables.RESULTS / "libraries.csv").exists():
        pytest.skip("benchmarks/results/libraries.csv, which `make time-libraries` writes")
    speed_ups = {row["model"]: float(row["speed-up"]) for row in tables.read("libraries.csv")}
    assert {name: gain for name, gain in speed_ups.items() if gain < 0.97} == {}
    assert {name: gain for name, gain in speed_ups.items() if "Grounding" in name and gain < 1.2} == {}


def test_rows_with_logits_and_of_modules_have_tables_of_their_own(tables, monkeypatch):
    def row(workload, direction, implementation, time):
        return {
            "workload": workload, "direction": direction, "implementation": implementation, "milliseconds": str(time),
            "times ours": str(time / 4), "dtype": "float32", "machine": "m",
        }  # fmt: skip

    beside = {"bare": ("gather floor", 8), "logits": ("bare operator", 5), "module": ("layers + operator", 2)}
    beside["pool"] = ("torch.compile", 8)  # an operator without maps has no floor
    rows = [
        row(name, direction, implementation, time)
        for name, other in beside.items()
        for direction in ("forward", "forward + backward", "backward")
        for implementation, time in (("mx_driving", 4), ("plain torch", 40), other)
    ]
    monkeypatch.setattr(tables, "read", lambda name: rows)
    header, _, *body = tables.TABLES["with_logits"]().splitlines()
    assert header == "| workload | mx_driving, ms | ours / bare operator | over plain torch | over torch.compile |"
    assert body == [f"| logits; {way} | 4.00 | 0.80 | 10.0 |  |" for way in ("forward", "forward + backward")]
    assert tables.TABLES["modules"]().splitlines()[2] == "| module; forward | 4.00 | 2.00 | 10.0 |  |  |  |  |  |"
    header, _, *body = tables.TABLES["forward"]().splitlines()
    assert header == "| workload | mx_driving, ms | over plain torch | over torch.compile |"
    assert body == ["| bare | 4.00 | 10.0 |  |", "| pool | 4.00 | 10.0 | 2.0 |"]
    assert tables.TABLES["floors"]().splitlines()[2:] == ["| bare | 4.00 | 0.50 |  | 4.00 | 0.50 |  |"]
    monkeypatch.setattr(tables, "read", lambda name: rows[:9])
    # a rival that was not measured has no column there
    assert tables.TABLES["forward"]().splitlines()[0] == "| workload | mx_driving, ms | over plain torch |"
    assert tables.TABLES["modules"]() == tables.NOT_YET


def test_the_support_page_shows_what_was_recorded(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "SUPPORT", tmp_path)
    assert tables.tested() == tables.tested_by_file() == tables.wheels() == tables.NOTHING_YET
    assert tables.deploy() == tables.tested_libraries() == tables.NOTHING_YET
    place = "3.11.7,Linux x86_64,EPYC,oldest"
    counts = (
        "2.11.0,{},test_a.py,3,0,0,2026-11-22",
        "2.6.0+cu124,{},test_a.py,1,0,2,2026-11-22",
        "2.6.0+cu124,{},test_b.py,0,1,0,2026-11-23",
    )
    header = "torch,python,system,processor,packages,file,passed,failed,skipped,date"
    (tmp_path / "tests.csv").write_text("\n".join([header, *(row.format(place) for row in counts)]))
    assert tables.tested().splitlines()[2:] == [
        "| 2.6.0+cu124 | oldest | 3.11.7 | Linux x86_64 | EPYC | 2 | 1 passed, 1 failed, 2 skipped | 2026-11-23 |",
        "| 2.11.0 | oldest | 3.11.7 | Linux x86_64 | EPYC | 1 | 3 passed | 2026-11-22 |",
    ]
    assert tables.tested_by_file().splitlines()[2:] == ["| a | 1 passed, 2 skipped | 3 passed |", "| b | 1 failed |  |"]
    header = "platform,wheel,bytes,built_by,checked,run,date"
    (tmp_path / "wheels.csv").write_text(f"{header}\nlinux,x.whl,1230000,gcc,imports libc,9 tests,2026-11-22\n")
    line, _, built, *_ = tables.wheels().splitlines()
    assert line == "- **linux**: `x.whl`, 1.23 MB. imports libc. Run: 9 tests. Looked at on 2026-11-22."
    assert built == "*Built by gcc.*"
    header = "operator,runtime,version,exports,runs,difference,times ours,message,machine"
    rows = ("a,Fast,fast 1,yes,yes,1e-7,2.04,,m", "b,Fast,fast 1,yes,no,,,It fell. Twice.,m", "a,Far,far 2,yes,not here,,,,m")
    (tmp_path / "deploy.csv").write_text("\n".join([header, *rows]))
    _, _, *body = tables.deploy().splitlines()
    assert body[:2] == ["| Fast | 2.0 (1e-7) | does not run [1] |", "| Far | exports, not run |  |"]
    assert body[3:] == ["1. `It fell`", "", "*m; far 2, fast 1*"]


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    """As `make docs` does; -E reads every page anew."""
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    command = ["-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-d", tmp_path / "doctrees"]
    python(*command, "-b", "html", DOCS, tmp_path / "html")
    for page in PAGES:
        assert (tmp_path / "html" / page.with_suffix(".html").name).stat().st_size > 2000
    html = "".join(file.read_text(encoding="utf-8") for file in (tmp_path / "html").glob("*.html"))
    assert not re.findall(r'(?:src="|<link[^>]*href=")https?://[^"]*', html), "a page fetches nothing from elsewhere"
    assert "<math" in html


def _said_in_code(file: pathlib.Path, word: str) -> bool:
    """Whether a file names it outside of comments and docstrings."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return word in re.sub(r"//[^\n]*|/\*[\s\S]*?\*/", "", text)
    words = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type != tokenize.COMMENT]
    return any(word in token.string and not token.string.startswith('"""') for token in words)


def test_the_list_of_an_operators_files_is_complete():
    """CONTRIBUTING lists the files of a new operator. All files of an old one must be on the list."""
    section = re.search(r"## Adding an operator\n(.*?)\n## ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
    assert section
    listed = set(re.findall(r"`([^`]+)`", section[1]))
    name = "geometric_kernel_attention"
    files = [f for folder in ("src", "native") for f in sorted((ROOT / folder).rglob("*")) if f.suffix in (".py", ".h", ".cpp")]
    touched = [file for file in files if name in file.stem or _said_in_code(file, name)]
    assert len(touched) > 15
    assert [f for f in touched if not any(f.as_posix().endswith("/" + one.replace("<operator>", name)) for one in listed)] == []
