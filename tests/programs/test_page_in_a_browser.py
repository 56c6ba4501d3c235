"""viz.page in Chromium: mouse, touch and keys, filters, a phone's width, nothing on the console and nothing fetched.

`make test-page` runs it. MX_DRIVING_TEST_BROWSER names the browser; without it these tests are left out, because a browser is
no package of Python's. If it is set, a missing browser, driver or selenium is a failure.
"""

from __future__ import annotations

import base64
import json
import os
import pathlib
import shutil

import pytest
import torch

from mx_driving import viz

BROWSER = os.environ.get("MX_DRIVING_TEST_BROWSER", "")
pytestmark = [
    pytest.mark.skipif(not BROWSER, reason="MX_DRIVING_TEST_BROWSER names no browser; make test-page sets it"),
    pytest.mark.xdist_group("browser"),
]
PICTURES = os.environ.get("MX_DRIVING_TEST_SCREENSHOTS", "")  # a folder, to look at what the tests saw
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --hide-scrollbars"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = shutil.which("chromedriver")
    assert found, "chromedriver must be on the path"  # selenium would download one
    driver = webdriver.Chrome(options, Service(found))
    yield driver
    driver.quit()


class Page:
    """A page in the browser, as wide as asked."""

    def __init__(self, driver, path: pathlib.Path) -> None:
        self.driver, self.path = driver, path

    def open(self, width: int = 1280, height: int = 900, dark: bool = False, anchor: str = "", motion: bool = True) -> Page:
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **sizes)
        self.command("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        reduced = {"name": "prefers-reduced-motion", "value": "no-preference" if motion else "reduce"}
        self.command("Emulation.setEmulatedMedia", features=[scheme, reduced])
        self.driver.get("about:blank")
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        self.driver.get(self.path.as_uri() + anchor)
        self.settle("document.querySelector('#number').value !== ''")
        return self

    def command(self, name: str, **parameters):
        return self.driver.execute_cdp_cmd(name, parameters)

    def run(self, script: str):
        return self.driver.execute_script(script)

    def settle(self, condition: str = "true") -> None:
        """Wait for the condition, and for two frames: what was asked for has been drawn."""
        self.driver.set_script_timeout(20)
        self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            f"const look = () => ({condition}) ? requestAnimationFrame(() => requestAnimationFrame(() => done())) :"
            "  requestAnimationFrame(look); look();"
        )

    def text(self, selector: str) -> str:
        return self.run(f"return document.querySelector({json.dumps(selector)}).textContent")

    def query(self) -> int:
        return int(self.run("return document.querySelector('#number').value"))

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.by import By

        self.driver.find_element(By.ID, "plane").send_keys(*keys)
        self.settle()

    def click(self, selector: str, times: int = 1) -> None:
        for _ in range(times):
            self.run(f"document.querySelector({json.dumps(selector)}).click()")
        self.settle()

    def place(self, x: float, y: float, of: str = "#plane") -> tuple[float, float]:
        """Where a share of an element is in the window."""
        box = self.run(
            f"const e = document.querySelector({json.dumps(of)}); e.scrollIntoView({{block: 'center'}});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
        )
        return box[0] + x * box[2], box[1] + y * box[3]

    def mouse(self, kind: str, x: float, y: float, of: str = "#plane", **more) -> None:
        left, top = self.place(x, y, of)
        self.command("Input.dispatchMouseEvent", type=kind, x=left, y=top, pointerType="mouse", **more)
        self.settle()

    def touch(self, kind: str, *places: tuple[float, float]) -> None:
        points = [dict(zip("xy", self.place(*place), strict=True)) for place in places]
        self.command("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        self.settle()

    def marks(self, number: int = 0) -> tuple[int, float | None]:
        """How many pixels of a picture are far from grey, and their mean column as a share of its width. The pictures of these
        tests are grey, and marks are not."""
        return self.run(
            f"const shown = document.querySelectorAll('#panels canvas')[{number}];"
            "const {width, height} = shown; const copy = Object.assign(document.createElement('canvas'), {width, height});"
            "const context = copy.getContext('2d', {willReadFrequently: true}); context.drawImage(shown, 0, 0);"
            "const pixels = context.getImageData(0, 0, width, height).data; let [count, sum] = [0, 0];"
            "for (let i = 0; i < pixels.length; i += 4) {"
            " const [r, g, b] = pixels.subarray(i, i + 3);"
            " if (Math.max(r, g, b) - Math.min(r, g, b) > 60) { count++; sum += ((i / 4) % width) / width; } }"
            "return [count, count ? sum / count : null]"
        )

    def hues(self, number: int = 0) -> int:
        """How many pixels of a picture are marks'."""
        return self.marks(number)[0]

    def shares(self) -> list[str]:
        return self.run("return [...document.querySelectorAll('figcaption .share')].map((e) => e.textContent)")

    def shoot(self, name: str) -> None:
        if PICTURES:
            picture = self.command("Page.captureScreenshot", captureBeyondViewport=True)["data"]
            (pathlib.Path(PICTURES) / f"{name}.png").write_bytes(base64.b64decode(picture))


def look_of(operator: str) -> viz.Look:
    """Three cameras, twelve queries; query q looks round ((q + 0.5) / 12, camera's height), and camera 2 sees nothing."""
    torch.manual_seed(0)
    heads, levels, points, cameras, queries = 4, 2, 3, 3, 12
    x = ((torch.arange(queries) + 0.5) / queries).view(-1, 1)
    y = torch.tensor([0.3, 0.7, 9.0])
    centre = torch.stack(torch.broadcast_tensors(x, y), -1)  # [query, camera, 2]
    shapes = torch.tensor([[20, 32], [10, 16]])
    if operator == "deformable_aggregation":
        places = centre[None, :, None] + 0.06 * (torch.rand(1, queries, points, cameras, 2) - 0.5)
        weights = torch.rand(1, queries, points, cameras, levels, heads) + 0.1
        tables = shapes.expand(cameras, 2, 2), torch.arange(cameras)[:, None] * 800 + torch.tensor([0, 640])
        return viz.Look(operator, torch.rand(1, 2400, 8), *tables, places, weights)
    offsets = 0.06 * (torch.rand(cameras, queries, heads, levels, points, 2) - 0.5)
    places = centre.transpose(0, 1)[:, :, None, None, None] + offsets
    if operator == "geometric_kernel_attention":
        places = places[:2] * shapes.flip(-1)[:, None]
    weights = torch.rand(places.shape[:-1]) + 0.1
    return viz.Look(operator, torch.rand(len(places), 800, heads, 2), shapes, torch.tensor([0, 640]), places, weights)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each operator, written once."""
    folder = tmp_path_factory.mktemp("pages")
    grey = torch.linspace(0.2, 0.6, 320).expand(200, 320)
    for operator in ("multi_scale_deformable_attn", "deformable_aggregation", "geometric_kernel_attention"):
        look = look_of(operator)
        cameras = 2 if operator == "geometric_kernel_attention" else 3
        pictures = {f"camera {name}": grey for name in "ABC"[:cameras]}
        plane = viz.Plane((3, 4), labels=[f"cell {i}" for i in range(12)])
        viz.page({"first": look, "second": look}, pictures, folder / f"{operator}.html", plane=plane)
    return folder


@pytest.fixture
def page(browser, pages):
    """The page of multi_scale_deformable_attn. In the end nothing was logged, and nothing asked of any server."""
    shown = Page(browser, pages / "multi_scale_deformable_attn.html")
    yield shown
    quiet(browser)


def quiet(browser) -> None:
    assert browser.get_log("browser") == []
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in asked if m["method"] == "Network.requestWillBeSent"]
    assert urls  # the log works: it names the page itself
    assert {url.partition(":")[0] for url in urls} <= {"file", "data", "about"}


@pytest.mark.parametrize("operator", ["multi_scale_deformable_attn", "deformable_aggregation", "geometric_kernel_attention"])
def test_every_operator_is_shown(browser, pages, operator):
    page = Page(browser, pages / f"{operator}.html").open()
    page.shoot(operator)
    cameras = 2 if operator == "geometric_kernel_attention" else 3
    assert page.text("#facts").replace("\xa0", " ").startswith(f"{operator} · {cameras} cameras · 4 ")
    assert [share.startswith("24 samples, ") for share in page.shares()[:2]] == [True, True]
    assert page.shares()[2:] == ["not read"] * (cameras - 2)
    assert min(page.hues(0), page.hues(1)) > 100
    if cameras == 3:
        assert page.hues(2) == 0
    assert "in 2 of " in page.text("#summary")
    quiet(browser)


def test_the_mouse_moves_the_query_and_a_click_holds_it(page):
    page.open()
    page.mouse("mouseMoved", 0.1, 0.1)
    assert (page.query(), page.text("#label"), page.text("#where")) == (0, "cell 0", "row 0, column 0")
    page.mouse("mouseMoved", 0.9, 0.5)
    assert page.query() == 7
    page.mouse("mousePressed", 0.9, 0.5, button="left", buttons=1, clickCount=1)
    page.mouse("mouseReleased", 0.9, 0.5, button="left", clickCount=1)
    page.mouse("mouseMoved", 0.1, 0.9)
    assert page.query() == 7
    assert page.run("return document.querySelector('#hold').ariaPressed") == "true"
    page.click("#hold")
    page.mouse("mouseMoved", 0.12, 0.9)
    assert page.query() == 8


def test_marks_move_with_the_query(page):
    """The mean column of coloured pixels follows the query's place on the pictures."""
    page.open()
    page.click("#loupe")
    columns = []
    for query in (0, 6, 11):
        page.run(f"const n = document.querySelector('#number'); n.value = {query}; n.dispatchEvent(new Event('change'))")
        page.settle()
        columns.append(page.marks()[1])
    assert columns == pytest.approx([0.5 / 12, 6.5 / 12, 11.5 / 12], abs=0.03)


def test_keys_move_and_hold_the_query(page):
    from selenium.webdriver.common.keys import Keys

    page.open(anchor="#query=5")
    assert page.query() == 5
    for key, query in ((Keys.ARROW_RIGHT, 6), (Keys.ARROW_DOWN, 10), (Keys.ARROW_LEFT, 9), (Keys.ARROW_UP, 5)):
        page.press(key)
        assert page.query() == query
    page.press(Keys.HOME)
    assert page.query() == 0
    page.press(Keys.END)
    assert page.query() == 11
    page.press(Keys.SHIFT, Keys.ARROW_LEFT)
    assert page.query() == 8
    page.press(Keys.ENTER)
    assert page.run("return document.querySelector('#hold').ariaPressed") == "true"
    assert page.run("return getComputedStyle(document.querySelector('#plane')).outlineStyle") == "solid"
    page.settle("location.hash === '#query=8&call=1'")


def test_filters_of_heads_levels_and_weights(page):
    page.open()
    whole = page.hues()
    page.click("#heads .row:nth-of-type(2)")
    page.click("#heads .row:nth-of-type(3)")
    assert page.shares()[0].startswith("12 samples")
    assert page.hues() < whole
    page.click("#heads .rows-head button")
    assert page.shares()[0].startswith("24 samples")
    page.run("document.querySelector('#levels .row').dispatchEvent(new MouseEvent('click', {shiftKey: true}))")
    page.settle()
    assert page.shares()[0].startswith("12 samples")
    assert page.run("return [...document.querySelectorAll('#levels .row')].map((e) => e.ariaPressed)") == ["true", "false"]
    page.click("#levels .rows-head button")
    for value, shown in ((60, "samples"), (100, "not read")):
        page.run(f"const e = document.querySelector('#least'); e.value = {value}; e.dispatchEvent(new Event('input'))")
        page.settle()
        assert shown in page.shares()[0]
    assert page.hues() == 0


def test_colours_levels_apart_calls_and_the_table(page):
    page.open()
    for kind in ("head", "level", "weight"):
        page.click(f"input[name=colour][value={kind}]")
        assert page.run("return document.querySelector('#scale').hidden") == (kind != "weight")
    page.click("input[name=apart][value=apart]")
    titles = page.run("return [...document.querySelectorAll('figcaption .name')].map((e) => e.textContent)")
    titles = [title.replace("\xd7", "x") for title in titles]
    assert titles[:3] == ["camera A, level 0 (20 x 32)", "camera A, level 1 (10 x 16)", "camera B, level 0 (20 x 32)"]
    assert page.shares()[1].startswith("12 samples")
    page.shoot("apart")
    page.click("#table summary")
    assert page.run("return document.querySelectorAll('#rows tr').length") == 12
    weights = page.run("return [...document.querySelectorAll('#rows td:last-child')].map((e) => Number(e.textContent))")
    assert weights == sorted(weights, reverse=True)
    page.run("const e = document.querySelector('#call'); e.value = 1; e.dispatchEvent(new Event('change'))")
    page.settle("location.hash.endsWith('&call=2')")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_no_width_scrolls_sideways(page, width, dark):
    page.open(width, 844, dark)
    page.click("#table summary")
    page.shoot(f"{width}-{'dark' if dark else 'light'}")
    wide = page.run(
        "return [...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5)"
        ".map((e) => e.tagName + '#' + e.id)"
    )
    assert wide == []
    assert page.run("return document.documentElement.scrollWidth") == width
    assert page.run("return getComputedStyle(document.body).colorScheme || matchMedia('(prefers-color-scheme: dark)').matches")
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == dark


def test_a_finger_drags_the_query_on_a_phone(page):
    page.open(390, 844)
    page.touch("touchStart", (0.1, 0.1))
    assert page.query() == 0
    page.touch("touchMove", (0.9, 0.9))
    assert page.query() == 11
    page.touch("touchEnd")
    assert page.run("return getComputedStyle(document.querySelector('#plane')).touchAction") == "none"  # else it scrolls
    least = page.run(
        "return Math.min(...[...document.querySelectorAll('button, select, .row')].map((e) => e.offsetHeight || 99))"
    )
    assert least >= 24


def test_foreign_texts_do_nothing(browser, tmp_path):
    text = "</script><img src=x onerror=alert(1)><script>window.seized = 1</script>"
    look = look_of("multi_scale_deformable_attn")
    grey = torch.rand(20, 32)
    plane = viz.Plane(labels=[text] * 12)
    viz.page({text: look, "b": look}, {text: grey, "b": grey, "c": grey}, tmp_path / "a.html", plane=plane, title=text)
    page = Page(browser, tmp_path / "a.html").open()
    assert [page.text(selector) for selector in ("h1", "#label", "figcaption .name", "option")] == [text] * 4
    assert page.run("return [window.seized ?? null, document.images.length]") == [None, 0]
    quiet(browser)
