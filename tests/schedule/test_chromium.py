"""The web page in a real browser: it loads, fits, and shows tooltips."""

import functools
import json
import re
import shutil
import subprocess

import pytest

from pipemesh.schedule import Costs, simulate, zb_v
from pipemesh.schedule.render import to_html, to_svg

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="NO CHROMIUM: the drawings were not opened in a browser"
)

# Runs in the page: hovers over a cell and writes what is to be seen into the document.
PROBE = """
<script>
{
const cells = [...document.querySelectorAll('rect.cell')];
const cell = cells[5];
const place = cell.getBoundingClientRect();
cell.dispatchEvent(new PointerEvent('pointermove', {bubbles: true,
  clientX: place.x + 3, clientY: place.y + 3}));
const tip = document.getElementById('tip');
const shown = {display: tip.style.display, text: tip.textContent};
document.body.dispatchEvent(new PointerEvent('pointermove', {bubbles: true}));
const labels = [...document.querySelectorAll('svg')].map(picture =>
  [...picture.querySelectorAll('text')].map(text => {
    const b = text.getBBox();
    return [b.x, b.y, b.width, b.height, text.textContent];
  }));
const sizes = [...document.querySelectorAll('svg')].map(p => [p.width.baseVal.value,
  p.height.baseVal.value]);
const out = document.createElement('pre');
out.id = 'probe';
out.textContent = JSON.stringify({cells: cells.length, shown, hidden: tip.style.display,
  titles: document.querySelectorAll('rect.cell title').length, labels, sizes});
document.body.append(out);
}
</script>
"""


def chromium(profile, *arguments):
    return subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={profile}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


@functools.cache
def timeline():
    return simulate(zb_v(4, 8), Costs(transfer=0.1))


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    page = folder / "page.html"
    page.write_text(to_html(timeline()).replace("</body>", PROBE + "</body>"), encoding="utf-8")
    dom = chromium(folder / "profile", "--dump-dom", page.as_uri())
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found, "the scripts of the page failed"
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return json.loads(text)


def test_every_action_is_on_the_page(probe):
    assert probe["cells"] == sum(map(len, timeline().schedule.rows))


def test_hovering_shows_stage_microbatch_and_times(probe):
    assert probe["shown"]["display"] == "block"
    assert probe["shown"]["text"] == (
        "0F5: forward of stage 0, microbatch 5; device 0, time 5 to 6"
    )
    assert probe["hidden"] == "none"
    assert probe["titles"] == 0  # Else the browser's own tooltip would appear too.


def test_no_two_texts_overlap_and_none_is_cut_off(probe):
    for texts, (width, height) in zip(probe["labels"], probe["sizes"], strict=True):
        boxes = [box for box in texts if box[2] and box[3]]
        for x, y, w, h, text in boxes:
            assert x >= 0 and y >= 0 and x + w <= width and y + h <= height, text
        for index, (x, y, w, h, text) in enumerate(boxes):
            for u, v, s, t, other in boxes[index + 1 :]:
                apart = x + w <= u + 1 or u + s <= x + 1 or y + h <= v + 3 or v + t <= y + 3
                assert apart, f"{text!r} overlaps {other!r}"


SURROUNDINGS = """
<script>
{
const seen = element => getComputedStyle(element);
const out = document.createElement('pre');
out.id = 'probe';
out.textContent = JSON.stringify({
  scrolls: [...document.querySelectorAll('.scroll')].some(e => e.scrollWidth > e.clientWidth),
  wide: document.documentElement.scrollWidth > innerWidth,
  page: [seen(document.body).color, seen(document.body).backgroundColor],
  picture: [seen(document.querySelector('.ink')).fill, seen(document.querySelector('.paper')).fill],
});
document.body.append(out);
}
</script>
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_small_screen_shows_all_of_a_page_in_light_and_in_the_dark(tmp_path, dark):
    page = tmp_path / "page.html"
    text = to_html(timeline(), measured=timeline())
    page.write_text(text.replace("</body>", SURROUNDINGS + "</body>"), encoding="utf-8")
    dom = chromium(
        tmp_path / "profile",
        "--window-size=1280,900",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--dump-dom",
        page.as_uri(),
    )
    found = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)[1])
    assert not found["scrolls"] and not found["wide"]
    for front, back in (found["page"], found["picture"]):
        brightness = [sum(map(int, re.findall(r"\d+", c)[:3])) for c in (front, back)]
        assert (
            (brightness[0] > brightness[1] + 400) if dark else (brightness[1] > brightness[0] + 400)
        )


def test_a_long_page_scrolls_beside_the_names_and_has_all_numbers(tmp_path):
    """Of 100 microbatches and more each cell has its number, if only from below upwards."""
    table = simulate(zb_v(4, 128))
    page = tmp_path / "page.html"
    page.write_text(to_html(table).replace("</body>", SCROLLED + "</body>"), encoding="utf-8")
    dom = chromium(
        tmp_path / "profile", "--window-size=1280,900", *SLOWLY, "--dump-dom", page.as_uri()
    )
    found = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)[1])
    assert found["numbers"] == found["cells"] == 4 * 6 * 128
    assert not found["wide"] and found["box"][0] > 1280 and found["box"][1] < 900
    assert found["moved"] == ["translate(500 0)"] * 2
    assert not found["outside"]


# Frames are drawn before the page is dumped.
SLOWLY = ["--virtual-time-budget=10000"]
SCROLLED = """
<script>
requestAnimationFrame(() => {
const box = document.querySelector('.scroll');
box.scrollLeft = 500;
box.dispatchEvent(new Event('scroll'));
const cells = [...document.querySelectorAll('rect.cell')];
const numbers = cells.map(cell => cell.parentNode.querySelector('text')).filter(text => text);
const outside = numbers.filter(text => {
  const [a, b] = [text, text.parentNode.querySelector('rect')].map(e => e.getBoundingClientRect());
  return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 ||
    a.bottom > b.bottom + 1;
});
const out = document.createElement('pre');
out.id = 'probe';
out.textContent = JSON.stringify({cells: cells.length, numbers: numbers.length,
  wide: document.documentElement.scrollWidth > innerWidth,
  box: [box.scrollWidth, box.clientHeight], outside: outside.length,
  moved: [...box.querySelectorAll('g.names')].map(g => g.getAttribute('transform'))});
document.body.append(out);
});
</script>
"""


def test_a_screenshot_shows_the_colours(tmp_path):
    picture, shot = tmp_path / "picture.svg", tmp_path / "shot.png"
    picture.write_text(to_svg(timeline()))
    chromium(tmp_path / "profile", f"--screenshot={shot}", picture.as_uri())
    assert shot.read_bytes().startswith(b"\x89PNG")
    assert shot.stat().st_size > 5000
