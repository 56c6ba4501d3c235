"""README and pages: Python blocks run as they stand, links and figures hold, nothing stands twice, the site builds."""

import doctest
import importlib
import importlib.metadata
import pathlib
import re
import socket

import pytest
import torch
import torch.distributed
from programs import python

import mx_driving
from mx_driving import _needs
from mx_driving._patch import _patch, known

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


def fences(text: str, language: str) -> list[str]:
    return [body for _, info, body in FENCE.findall(text) if info == language]


SNIPPETS = [
    pytest.param(page, snippet, id=f"{page}-{number}")
    for page, text in TEXTS.items()
    for number, snippet in enumerate(fences(text, "python"), 1)
]


def test_every_python_block_runs():
    """Every block names its language `python`; a test would not run blocks of another name."""
    for page, text in TEXTS.items():
        assert len(re.findall(r"^ *[`~]{3,} *(?:\{\S+ *)?py", text, flags=re.MULTILINE)) == len(fences(text, "python")), page
    assert len(fences(TEXTS["README.md"], "python")) >= 2
    for operator in mx_driving.backends()["cpu"]:
        blocks = fences(TEXTS[f"docs/{operator.removesuffix('_with_logits')}.md"], "python")
        assert any(f"mx_driving.{operator}(" in block for block in blocks)


@pytest.mark.parametrize("page", [page for page in TEXTS if page != "README.md"])
def test_code_fits_its_column(page):
    """A page shows a hundred characters of a line without scrolling."""
    for _, info, body in FENCE.findall(TEXTS[page]):
        assert info == "math" or max(map(len, body.splitlines()), default=0) <= 100


def a_detector_and_a_photograph() -> None:
    """Save a small Deformable DETR with random weights under the name that the pages would download."""
    import detectors

    detectors.saved(pathlib.Path("SenseTime/deformable-detr"), pathlib.Path("street.jpg"))


PREPARED = dict.fromkeys(("docs/models.md", "docs/training.md"), a_detector_and_a_photograph)


@pytest.fixture
def place_to_run(tmp_path, monkeypatch):
    """Change to an empty folder, and set the variables that torchrun sets for a single process."""
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
@pytest.mark.usefixtures("place_to_run")
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
    is_compiled = "transformers" in snippet and "torch.export" in snippet
    if is_compiled and (sentence := _needs.lacks("A compiled model of transformers 5")):
        pytest.skip(sentence)
    if "from_pretrained" in snippet:
        PREPARED[page]()
    if "compat.install" in snippet:  # compat.install must come before imports that other tests may have made
        python("-W", "ignore", "-c", snippet)
        return
    exec(compile(snippet, page, "exec"), {"__name__": "__main__"})  # older torch.compile imports it
    assert not _patch._changes, "a snippet must give back what it patches"


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub and MyST give the headings."""
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
    others = ("index", "api", "changelog", "maintaining")  # CONTRIBUTING leads to the last
    assert {page for page in TEXTS if page.startswith("docs/")} - linked == {f"docs/{name}.md" for name in others}


def test_the_readme_is_short():
    assert len(TEXTS["README.md"].splitlines()) <= 130


def outline(text: str) -> list[object]:
    """Return the parts of a page that its translation shares: levels of headings, links, code, and figures of tables."""
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
    monkeypatch.setattr(known, "read_table", known.read_table.__wrapped__)  # without the rows that other tests have added
    return importlib.import_module("tables")


@pytest.mark.parametrize("text", [TEXTS["README.md"], CHINESE.read_text(encoding="utf-8")], ids=["README", "zh-CN"])
def test_the_readmes_figures_are_those_of_the_files(tables, text):
    """The tables of whole models on a CPU and a GPU have the files' figures, and the text has each file's date."""
    for draw in (tables.times.first, tables.times.first_on_gpu):
        _, _, *rows = [line for line in draw().replace("\u00a0", " ").splitlines() if line.startswith("|")]
        assert len(rows) == 5
        assert set(rows) <= set(text.splitlines())
    for file in (tables.times.BENCH, tables.times.BY_MODE, tables.times.GPU_MODELS):
        assert tables.times.read(file)[0]["machine"].partition(",")[0] in text


def test_the_landing_pages_figures_are_those_of_the_files(tables):
    row = next(row for row in tables.times.read(tables.times.BY_MODE) if row["model"] == "Deformable DETR")
    before, after, speed_up = (float(row[column]) for column in ("before s", "after s", "speed-up"))
    by = tables.times.gpu_calls(short=True)["Deformable DETR, bfloat16, batch 8"].values()
    plain, extension, ours = (float(row["milliseconds"]) for row in by)
    for sentence in (
        f"**On a CPU {speed_up:.1f} times faster**: a whole Deformable DETR takes {after:.2f} s a picture",
        f"On an H100 a batch of 8 in bfloat16 takes {ours} ms instead of {plain}, and {extension} with the CUDA",
        f"a picture instead of {before:.2f} s",
    ):
        assert sentence in TEXTS["docs/index.md"]


def test_every_public_name_has_an_entry():
    entries = "".join(file.read_text(encoding="utf-8") for file in (DOCS / "api").glob("*.md"))
    missing = [name for name in mx_driving.__all__ if name != "ops" and not re.search(rf"\b{name}\b", entries)]
    assert not missing


def test_the_extras_of_the_page_are_those_of_the_package():
    table = TEXTS["docs/start.md"].partition("| extra | for |")[2].partition("\n\n")[0]
    extras = set(importlib.metadata.metadata("mx-driving-portable").get_all("Provides-Extra"))
    assert set(re.findall(r"^\| `(\w+)` ", table, flags=re.MULTILINE)) == extras - {"test"}


def test_what_is_cited_is_this_version():
    assert f"\nversion: {mx_driving.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_tables_and_charts_of_pages_are_those_of_the_files(tables):
    marked = [name for text in TEXTS.values() for _, name, _ in tables.MARKED.findall(text)]
    assert sorted(marked) == sorted(tables.TABLES)
    stale = [page for page, text in TEXTS.items() if tables.refresh(text) != text]
    assert not stale, "`make tables` writes the tables of these pages anew"


def test_charts_show_the_files_times(tables):
    """Each chart's text alternative has the times that the file has now."""
    charts = importlib.import_module("charts")
    for name, make in charts.CHARTS.items():
        drawn = (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8")
        assert make().alternative() in drawn, "`make tables` draws it anew"
    for row in tables.times.read(tables.times.GPU_MODELS):
        assert charts.digits(float(row["milliseconds"])) in charts.gpu_models().alternative()
    assert "Deformable DETR: its own code 2399, mx_driving 1101;" in charts.cpu_models().alternative()


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    """Build as `make docs`, without pages of source code, which take a sixth of the time. -E reads every page anew."""
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    command = ["-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-d", tmp_path / "doctrees"]
    command += ["-D", "extensions=myst_parser,sphinx.ext.autodoc,sphinx.ext.autosummary,sphinx.ext.napoleon"]
    python(*command, "-b", "html", DOCS, tmp_path / "html")
    for page in PAGES:
        assert (tmp_path / "html" / page.with_suffix(".html").name).stat().st_size > 2000
    html = "".join(file.read_text(encoding="utf-8") for file in (tmp_path / "html").glob("*.html"))
    assert not re.findall(r'(?:src="|<link[^>]*href=")https?://[^"]*', html), "a page fetches nothing from elsewhere"
    assert "<math" in html


FOLDERS = ("src", "native", "tests", "benchmarks", "docs", "examples", "wheels", ".github")
TREE = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix not in (".pyc", ".so", ".html")]
TREE += [file for file in ROOT.iterdir() if file.is_file()]


@pytest.fixture(scope="module")
def words_of_the_code():
    """Return the words of all programs, without private names of tests."""
    code = [file for file in TREE if file.suffix in (".py", ".cpp", ".h", ".c", ".yml", ".toml", ".txt", "") and file.is_file()]
    return {
        word
        for file in code
        for word in re.findall(r"\w+", file.read_text(encoding="utf-8", errors="replace"))
        if not word.startswith("_") or "tests" not in file.relative_to(ROOT).parts
    }


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "native/README.md", "docs/maintaining.md", "docs/kernels.md"])
def test_names_on_pages_of_maintainers_are_in_the_tree(page, words_of_the_code):
    """Search for files by the end of their path, for make targets, and for code with an underscore or a capital."""
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = [f"/{file.relative_to(ROOT).as_posix()}" for file in TREE]
    files = set(re.findall(r"(?<![\w<>])[\w./-]*\w\.(?:py|cpp|h|c|md|csv|toml|yml|txt)\b", text))
    missing = {name for name in files if not any(path.endswith(f"/{name.removeprefix('../')}") for path in paths)}
    targets = re.findall(r"^([\w-]+(?: [\w-]+)*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    missing |= set(re.findall(r"(?:`|    )make ([a-z][\w-]*)", text)) - {name for line in targets for name in line.split()}
    names = re.findall(r"`(?!torch\.|np\.)([A-Za-z_][\w.]*)(?:\(\))?`", text)
    parts = {part for name in names if name not in files for part in name.split(".") if re.search("_|[A-Z]", part)}
    assert not sorted(missing | (parts - words_of_the_code))
