"""viz.page in Chromium: mouse, touch and keys, filters, a phone's width, nothing on the console and nothing fetched.

`make test-page` runs it. MX_DRIVING_TEST_BROWSER names the browser; without it these tests are left out, because a browser is
no package of Python's. If it is set, a missing browser, driver or selenium is a failure.
"""

import json
import os
import pathlib
import shutil

import pytest
import torch
from pages import aggregation, attention, geometric

from mx_driving import viz

BROWSER = os.environ.get("MX_DRIVING_TEST_BROWSER", "")
pytestmark = [
    pytest.mark.skipif(not BROWSER, reason="MX_DRIVING_TEST_BROWSER names no browser; make test-page sets it"),
    pytest.mark.xdist_group("browser"),
]
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
    chromedriver = shutil.which("chromedriver")
    assert chromedriver, "chromedriver must be on the path"  # selenium would download one
    driver = webdriver.Chrome(options, Service(chromedriver))
    yield driver
    driver.quit()


class Page:
    """A page in the browser, as wide as asked."""

    def __init__(self, driver, path: pathlib.Path) -> None:
        self.driver, self.path = driver, path

    def open(self, width: int = 1280, dark: bool = False, anchor: str = ""):
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=width < 600)
        self.command("Emulation.setTouchEmulationEnabled", enabled=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
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
        """Wait for the condition, and for two frames, which draw what was asked for."""
        self.driver.set_script_timeout(20)
        self.driver.execute_async_script(
            "const done = arguments[arguments.length - 1];"
            f"const look = () => ({condition}) ? requestAnimationFrame(() => requestAnimationFrame(() => done())) :"
            "  requestAnimationFrame(look); look();"
        )

    def texts(self, selector: str) -> list[str]:
        return self.run(f"return [...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")

    def query(self) -> int:
        return int(self.run("return document.querySelector('#number').value"))

    def is_held(self) -> bool:
        return self.run("return document.querySelector('#hold').ariaPressed") == "true"

    def press(self, *keys: str) -> None:
        self.driver.find_element("id", "plane").send_keys(*keys)
        self.settle()

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
        self.settle()

    def change(self, selector: str, value: int, event: str = "change") -> None:
        self.run(f"const e = document.querySelector('{selector}'); e.value = {value}; e.dispatchEvent(new Event('{event}'))")
        self.settle()

    def point(self, kind: str, *place: float, **more) -> None:
        """Send an event of the mouse, or of a finger, at a share of the plane."""
        left, top, width, height = self.run(
            "const e = document.querySelector('#plane'); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]"
        )
        at = {"x": left + place[0] * width, "y": top + place[1] * height} if place else {}
        if kind.startswith("touch"):
            self.command("Input.dispatchTouchEvent", type=kind, touchPoints=[at] if at else [])
        else:
            self.command("Input.dispatchMouseEvent", type=kind, pointerType="mouse", **at, **more)
        self.settle()

    def marks(self, number: int = 0) -> tuple[int, float | None]:
        """Return how many pixels of a picture are far from grey, as marks are, and their mean column, 0..1."""
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


def known_look() -> viz.Look:
    """Three cameras, twelve queries; query q looks round ((q + 0.5) / 12, camera's height), and camera 2 sees nothing."""
    torch.manual_seed(0)
    x, y = ((torch.arange(12) + 0.5) / 12).view(12, 1, 1, 1), torch.tensor([0.3, 0.7, 9.0]).view(3, 1, 1, 1, 1)
    centre = torch.stack(torch.broadcast_tensors(x, y), -1)
    places = centre + 0.06 * (torch.rand(3, 12, 4, 2, 3, 2) - 0.5)
    tables = torch.tensor([[20, 32], [10, 16]]), torch.tensor([0, 640])
    return viz.Look("multi_scale_deformable_attn", torch.rand(3, 800, 4, 2), *tables, places, torch.rand(3, 12, 4, 2, 3) + 0.1)


SHARE = "figcaption .share"
GREY = torch.linspace(0.2, 0.6, 320).expand(200, 320)


@pytest.fixture(scope="module")
def known_page(tmp_path_factory):
    """The page of two calls of `known_look`, written once."""
    look, plane = known_look(), viz.Plane((3, 4), labels=[f"cell {i}" for i in range(12)])
    pictures = {f"camera {name}": GREY for name in "ABC"}
    return viz.page({"first": look, "second": look}, pictures, tmp_path_factory.mktemp("page") / "a.html", plane=plane)


@pytest.fixture
def page(browser, known_page):
    """The known page. In the end nothing was logged, and nothing asked of any server."""
    shown = Page(browser, known_page)
    yield shown
    quiet(browser)


def quiet(browser) -> None:
    assert browser.get_log("browser") == []
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in asked if m["method"] == "Network.requestWillBeSent"]
    assert urls  # the log works: it names the page itself
    assert {url.partition(":")[0] for url in urls} <= {"file", "data", "about"}


@pytest.mark.parametrize("make", [attention, aggregation, geometric])
def test_every_operator_is_shown(browser, make, tmp_path):
    torch.manual_seed(0)
    look, cameras = make(), 3 if make is aggregation else 2
    page = Page(browser, viz.page(look, [GREY] * cameras, tmp_path / "a.html")).open()
    assert page.texts("#facts")[0].replace("\xa0", " ").startswith(f"{look.operator} · {cameras} cameras · ")
    for number, share in enumerate(page.texts(SHARE)):
        assert (page.marks(number)[0] > 50) == (share != "not read"), share
    assert any("samples, " in share for share in page.texts(SHARE))
    quiet(browser)


def test_the_mouse_moves_the_query_and_a_click_holds_it(page):
    page.open()
    page.point("mouseMoved", 0.1, 0.1)
    assert (page.query(), page.texts("#label, #where")) == (0, ["row 0, column 0", "cell 0"])
    page.point("mousePressed", 0.9, 0.5, button="left", buttons=1, clickCount=1)
    page.point("mouseReleased", 0.9, 0.5, button="left", clickCount=1)
    page.point("mouseMoved", 0.1, 0.9)
    assert (page.query(), page.is_held()) == (7, True)
    page.click("#hold")
    page.point("mouseMoved", 0.12, 0.9)
    assert page.query() == 8


def test_keys_move_and_hold_the_query(page):
    from selenium.webdriver.common.keys import Keys

    page.open(anchor="#query=5")
    for keys, query in (((Keys.ARROW_RIGHT,), 6), ((Keys.ARROW_UP,), 2), ((Keys.END,), 11), ((Keys.SHIFT, Keys.ARROW_LEFT), 8)):
        page.press(*keys)
        assert page.query() == query
    page.press(Keys.ENTER)
    assert page.is_held()
    page.settle("location.hash === '#query=8&call=1'")


def test_marks_move_with_the_query_and_heads_and_weights_are_filtered(page):
    """The mean column of coloured pixels follows the query's place on the pictures."""
    page.open()
    page.click("#loupe")
    columns = []
    for query in (0, 6, 11):
        page.change("#number", query)
        columns.append(page.marks()[1])
    assert columns == pytest.approx([0.5 / 12, 6.5 / 12, 11.5 / 12], abs=0.03)
    assert [share.partition(",")[0] for share in page.texts(SHARE)] == ["24 samples", "24 samples", "not read"]
    page.click("#heads .row:nth-of-type(2)")
    assert page.texts(SHARE)[0].startswith("18 samples")
    page.change("#least", 100, "input")
    assert (page.texts(SHARE)[0], page.marks()[0]) == ("not read", 0)


def test_wide_pictures_use_a_wide_window_and_are_enlarged(page):
    """Three cameras take two columns of 1400 pixels, and a click or the button gives a picture the whole width."""
    sizes = "const e = [...document.querySelectorAll('#panels canvas')]; return e.map((c) => Math.round(c.clientWidth))"
    page.open(1400)
    assert page.run(sizes) == [485, 485, 485]
    page.click("#panels button")
    assert page.run(sizes) == [984, 485, 485]
    assert page.marks()[0] > 50
    page.click("#panels button")
    page.run("document.querySelectorAll('#panels canvas')[1].scrollIntoView()")
    left, top = page.run(
        "const b = document.querySelectorAll('#panels canvas')[1].getBoundingClientRect(); return [b.left + 9, b.top + 9]"
    )
    for kind in ("mousePressed", "mouseReleased"):
        page.command("Input.dispatchMouseEvent", type=kind, x=left, y=top, button="left", clickCount=1, pointerType="mouse")
    page.settle()
    assert page.run(sizes) == [485, 984, 485]
    assert page.texts("#panels button") == ["larger", "smaller", "larger"]


def test_a_phone(page):
    """A finger drags the query, and nothing scrolls sideways."""
    page.open(320, dark=True)
    page.click("#table summary")
    wide = "return [...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5)"
    assert page.run(f"{wide}.map((e) => e.tagName + '#' + e.id)") == []
    page.point("touchStart", 0.1, 0.1)
    assert page.query() == 0
    page.point("touchMove", 0.9, 0.9)
    assert page.query() == 11
    page.point("touchEnd")
    assert page.run("return getComputedStyle(document.querySelector('#plane')).touchAction") == "none"  # else it scrolls


def test_foreign_texts_do_nothing(browser, tmp_path):
    text = "</script><img src=x onerror=alert(1)><script>window.seized = 1</script>"
    look, plane = known_look(), viz.Plane(labels=[text] * 12)
    path = viz.page({text: look, "b": look}, {text: GREY, "b": GREY, "c": GREY}, tmp_path / "a.html", plane=plane, title=text)
    page = Page(browser, path).open()
    assert [page.texts(selector)[0] for selector in ("h1", "#label", "figcaption .name", "option")] == [text] * 4
    assert page.run("return [window.seized ?? null, document.images.length]") == [None, 0]
    quiet(browser)
