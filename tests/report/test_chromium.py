"""The pages in a real browser: no error, nothing without a size, nothing wider than a screen."""

import json
import re
import shutil
import subprocess

import pytest

from pipemesh.report import comparison, page, read
from tests.report import records

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="NO CHROMIUM: the pages of trainings were not opened in a browser"
)

# Runs in the page, and writes what is to be seen into it.
PROBE = """
<script>
{
const seen = element => getComputedStyle(element);
document.querySelectorAll('details').forEach(each => { each.open = true; });
const pictures = [...document.querySelectorAll('svg')];
const out = document.createElement('pre');
out.id = 'probe';
out.textContent = JSON.stringify({
  sizes: pictures.map(p => [p.getBoundingClientRect().width, p.getBoundingClientRect().height]),
  told: pictures.map(p => (p.getAttribute('aria-label') ||
    p.closest('figure').getAttribute('aria-label') || '').length),
  wide: document.documentElement.scrollWidth - innerWidth,
  scrolls: [...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth),
  colours: [seen(document.body).color, seen(document.body).backgroundColor],
  curve: [...document.querySelectorAll('.s0')].map(e => seen(e).stroke)[0],
  labels: pictures.map(picture => [...picture.querySelectorAll('text')].map(text => {
    const b = text.getBBox();
    return [b.x, b.y, b.width, b.height, text.textContent];
  })),
  boxes: pictures.map(p => [p.viewBox.baseVal.width, p.viewBox.baseVal.height]),
  broken: [...document.querySelectorAll('td, th')].flatMap(cell => {
    const text = cell.firstChild, range = document.createRange();
    if (!text || text.nodeType != Node.TEXT_NODE) return [];
    return [...text.data.matchAll(/(?<!\\S)\\S{1,20}(?!\\S)/g)].filter(word => {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      return range.getClientRects().length > 1;
    }).map(word => word[0]);
  }),
});
document.body.append(out);
}
</script>
"""


def opened(folder, text, dark=False, style=""):
    """What a browser makes of a page of 1280 pixels, and what it says of errors."""
    path = folder / "page.html"
    text = text.replace("<body>", f"<body style='{style}'>")
    path.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
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
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--user-data-dir={folder / 'profile'}",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, "the script failed"
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return json.loads(text)


def made(folder, make, **changes):
    folder.mkdir()
    return read(str(make(folder, **changes)))


def long_one(folder):
    """So many steps, devices and words that there is little room."""
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
    "shares": lambda folder: page(made(folder / "run", records.whole, told=("rows", "layers"))),
    "plain": lambda folder: page(made(folder / "run", records.plain)),
    "interrupted": lambda folder: page(made(folder / "run", records.interrupted)),
    "long": lambda folder: page(made(folder / "run", long_one)),
    "comparison": lambda folder: compared(folder / "runs"),
}


@pytest.mark.slow
def test_an_error_of_a_page_is_seen(tmp_path):
    text = page(made(tmp_path / "run", records.plain))
    with pytest.raises(AssertionError, match="of a script"):
        opened(tmp_path, text.replace("</body>", "<script>throw 'of a script'</script></body>"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_readable_at_1280_pixels(tmp_path, name):
    dark = name in ("comparison", "pipeline", "predicted")
    found = opened(tmp_path, PAGES[name](tmp_path), dark)
    assert len(found["sizes"]) >= 3
    for width, height in found["sizes"]:
        assert 300 < width <= 1240 and height > 100
    assert all(length > 20 for length in found["told"])
    assert found["wide"] <= 0
    assert max(found["scrolls"]) <= 0
    front, back = (sum(map(int, re.findall(r"\d+", c)[:3])) for c in found["colours"])
    assert (front > back + 400) if dark else (back > front + 400)
    assert found["curve"] == ("rgb(86, 180, 233)" if dark else "rgb(0, 114, 178)")
    for texts, (width, height) in zip(found["labels"], found["boxes"], strict=True):
        boxes = [box for box in texts if box[2] and box[3]]
        for x, y, w, h, text in boxes:
            assert x >= 0 and y >= 0 and x + w <= width and y + h <= height, text
        for index, (x, y, w, h, text) in enumerate(boxes):
            for u, v, s, t, other in boxes[index + 1 :]:
                apart = x + w <= u + 1 or u + s <= x + 1 or y + h <= v + 3 or v + t <= y + 3
                assert apart, f"{text!r} overlaps {other!r}"


@pytest.mark.slow
def test_words_are_whole_on_a_small_screen(tmp_path):
    """At 400 pixels there was a "st/ag/e"."""
    for name in ("pipeline", "comparison"):
        (tmp_path / name).mkdir()
        found = opened(tmp_path / name, PAGES[name](tmp_path / name), style="width: 352px")
        assert not found["broken"] and found["wide"] <= 0
