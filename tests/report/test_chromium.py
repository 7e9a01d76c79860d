"""Pages and pictures in a real browser: no error, nothing cut off, nothing wider than a screen."""

import functools
import html
import json
import re
import shutil
import subprocess

import pytest

from pipemesh.report import comparison, page, to_html
from pipemesh.schedule import Costs, simulate, zb_v
from tests.report import records
from tests.report.records import made

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="NO CHROMIUM: pages and pictures were not opened in a browser"
)

# Runs in every page, and finds what people see of it.
SEEN = """
const style = element => getComputedStyle(element);
document.querySelectorAll('details').forEach(each => { each.open = true; });
const pictures = [...document.querySelectorAll('svg')];
const seen = {
  sizes: pictures.map(p => [p.getBoundingClientRect().width, p.getBoundingClientRect().height]),
  wide: document.documentElement.scrollWidth - innerWidth,
  scrolls: [...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth),
  colours: [style(document.body).color, style(document.body).backgroundColor],
  labels: pictures.map(picture => [...picture.querySelectorAll('text')].map(text => {
    const b = text.getBBox();
    return [b.x, b.y, b.width, b.height, text.textContent];
  })),
  boxes: pictures.map(p => [p.viewBox.baseVal.width, p.viewBox.baseVal.height]),
};
"""
# Finds what is to be seen of the pages of runs.
OF_RUNS = """
seen.told = pictures.map(p => (p.getAttribute('aria-label') ||
  p.closest('figure').getAttribute('aria-label') || '').length);
seen.curve = [...document.querySelectorAll('.s0')].map(e => style(e).stroke)[0];
seen.broken = [...document.querySelectorAll('td, th')].flatMap(cell => {
  const text = cell.firstChild, range = document.createRange();
  if (!text || text.nodeType != Node.TEXT_NODE) return [];
  return [...text.data.matchAll(/(?<!\\S)\\S{1,20}(?!\\S)/g)].filter(word => {
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    return range.getClientRects().length > 1;
  }).map(word => word[0]);
});
"""
# Hovers over a cell of a schedule.
HOVER = """
const cells = [...document.querySelectorAll('rect.cell')];
const cell = cells[5];
const place = cell.getBoundingClientRect();
cell.dispatchEvent(new PointerEvent('pointermove', {bubbles: true,
  clientX: place.x + 3, clientY: place.y + 3}));
const box = document.getElementById('tip');
seen.tip = {display: box.style.display, text: box.textContent};
document.body.dispatchEvent(new PointerEvent('pointermove', {bubbles: true}));
seen.cells = cells.length;
seen.hidden = box.style.display;
seen.titles = document.querySelectorAll('rect.cell title').length;
seen.picture = [style(document.querySelector('.ink')).fill,
  style(document.querySelector('.paper')).fill];
"""
SCROLL = """
const box = document.querySelector('.tall');
box.scrollLeft = 500;
box.dispatchEvent(new Event('scroll'));
const cells = [...document.querySelectorAll('rect.cell')];
const numbers = cells.map(cell => cell.parentNode.querySelector('text')).filter(text => text);
const outside = numbers.filter(text => {
  const [a, b] = [text, text.parentNode.querySelector('rect')].map(e => e.getBoundingClientRect());
  return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 ||
    a.bottom > b.bottom + 1;
});
seen.cells = cells.length;
seen.numbers = numbers.length;
seen.box = [box.scrollWidth, box.clientHeight];
seen.outside = outside.length;
seen.moved = [...box.querySelectorAll('g.names')].map(g => g.getAttribute('transform'));
"""


def chromium(profile, *arguments):
    """Runs the browser in a window of 1280 pixels, and returns its output."""
    done = subprocess.run(
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
            "--enable-logging=stderr",
            "--window-size=1280,900",
            f"--user-data-dir={profile}",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def opened(folder, text, probe="", dark=False, style="", waits=False):
    """Returns what a probe finds in a page, or if it waits, in its first frame."""
    path = folder / "page.html"
    script = f"""<script>
    ({"requestAnimationFrame" if waits else "probe => probe()"})(() => {{
    {SEEN}{probe}
    const out = document.createElement('pre');
    out.id = 'probe';
    out.textContent = JSON.stringify(seen);
    document.body.append(out);
    }});
    </script>"""
    text = text.replace("<body>", f"<body style='{style}'>")
    path.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")
    dom = chromium(
        folder / "profile",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        # Frames are drawn before the page is dumped.
        *(["--virtual-time-budget=10000"] if waits else []),
        "--dump-dom",
        path.as_uri(),
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found, "the script failed"
    return json.loads(html.unescape(found[1]))


def assert_texts_are_apart(seen):
    """No two texts of a picture overlap, and none is cut off."""
    for texts, (width, height) in zip(seen["labels"], seen["boxes"], strict=True):
        boxes = [box for box in texts if box[2] and box[3]]
        for x, y, w, h, text in boxes:
            assert x >= 0 and y >= 0 and x + w <= width and y + h <= height, text
        for index, (x, y, w, h, text) in enumerate(boxes):
            for u, v, s, t, other in boxes[index + 1 :]:
                apart = x + w <= u + 1 or u + s <= x + 1 or y + h <= v + 3 or v + t <= y + 3
                assert apart, f"{text!r} overlaps {other!r}"


def brightness(colours):
    return [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours]


def assert_contrast(colours, dark):
    front, back = brightness(colours)
    assert (front > back + 400) if dark else (back > front + 400)


def long_one(folder):
    """Writes a record with so many steps, devices and words that there is little room."""
    flags = {f"a_flag_with_a_long_name_{n}": "x" * 200 for n in range(3)}
    records.whole(folder, last=3000, flags=flags, name="n" * 200, timed=False)
    records.schedule(records.Record(str(folder)), 8, 32)
    return folder


def compared(folder):
    folder.mkdir()
    one = made(folder / "one", records.whole)
    two = made(folder / "two", records.whole, level=2.0, timed=False, flags={"steps": 300})
    return comparison([one, two, made(folder / "three", records.plain)])


KNOWN = ("rows", "layers", "predicted")
PAGES = {
    "pipeline": lambda folder: page(made(folder / "run", records.whole)),
    "predicted": lambda folder: page(made(folder / "run", records.whole, told=KNOWN)),
    "interrupted": lambda folder: page(made(folder / "run", records.interrupted)),
    "long": lambda folder: page(made(folder / "run", long_one)),
    "comparison": lambda folder: compared(folder / "runs"),
}


@pytest.mark.slow
def test_script_errors_fail_the_test(tmp_path):
    text = page(made(tmp_path / "run", records.plain))
    with pytest.raises(AssertionError, match="of a script"):
        opened(tmp_path, text.replace("</body>", "<script>throw 'of a script'</script></body>"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable_at_1280_pixels(tmp_path, name):
    dark = name in ("comparison", "pipeline", "predicted")
    seen = opened(tmp_path, PAGES[name](tmp_path), OF_RUNS, dark)
    assert len(seen["sizes"]) >= 3
    for width, height in seen["sizes"]:
        assert 300 < width <= 1240 and height > 100
    assert all(length > 20 for length in seen["told"])
    assert seen["wide"] <= 0
    assert max(seen["scrolls"]) <= 0
    assert_contrast(seen["colours"], dark)
    assert seen["curve"] == ("rgb(86, 180, 233)" if dark else "rgb(0, 114, 178)")
    assert_texts_are_apart(seen)


@pytest.mark.slow
def test_words_are_whole_on_a_small_screen(tmp_path):
    """At 400 pixels there was a "st/ag/e"."""
    for name in ("pipeline", "comparison"):
        (tmp_path / name).mkdir()
        text = PAGES[name](tmp_path / name)
        seen = opened(tmp_path / name, text, OF_RUNS, style="width: 352px")
        assert not seen["broken"] and seen["wide"] <= 0


@functools.cache
def timeline():
    return simulate(zb_v(4, 8), Costs(transfer=0.1))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_schedule_is_readable_and_hovering_explains_it(tmp_path, dark):
    seen = opened(tmp_path, to_html(timeline(), measured=timeline()), HOVER, dark)
    assert seen["cells"] == 2 * sum(map(len, timeline().schedule.rows))
    assert seen["tip"]["display"] == "block"
    assert seen["tip"]["text"] == "0F5: forward of stage 0, microbatch 5; device 0, time 5 to 6"
    assert seen["hidden"] == "none"
    assert seen["titles"] == 0  # Else the browser's own tooltip would appear too.
    assert max(seen["scrolls"]) <= 0 and seen["wide"] <= 0
    assert_contrast(seen["colours"], dark)
    assert_contrast(seen["picture"], dark)
    assert_texts_are_apart(seen)


def test_a_long_schedule_scrolls_beside_its_names(tmp_path):
    """Of 100 microbatches and more each cell has its number, if only from below upwards."""
    seen = opened(tmp_path, to_html(simulate(zb_v(4, 128))), SCROLL, waits=True)
    assert seen["numbers"] == seen["cells"] == 4 * 6 * 128
    assert seen["wide"] <= 0 and seen["box"][0] > 1280 and seen["box"][1] < 900
    assert seen["moved"] == ["translate(500 0)"] * 2
    assert not seen["outside"]
