"""SVG: colours, elements, axes, and the charts that reports and benchmarks draw.

Every picture is a self-contained document. Attributes hold its light colours; a style has the dark
ones, for viewers that prefer them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from pipemesh.text import short

INK, PAPER, MUTED, GRID = "#1a1a1a", "#ffffff", "#595959", "#d9d9d9"
BAND, EDGE = "#f0f0f0", "#8a3f6b"
DARK_INK, DARK_PAPER, DARK_MUTED, DARK_GRID = "#ececec", "#181818", "#b0b0b0", "#4d4d4d"
# Light and dark colours of series: from the palette of Okabe and Ito, darker and lighter.
SERIES = (
    ("#0072b2", "#56b4e9"),
    ("#c14f00", "#ff9a52"),
    ("#00795a", "#2bc99a"),
    ("#a3447f", "#e29bc4"),
    ("#6b5b00", "#f0e442"),
    ("#444444", "#cccccc"),
)
# Curves differ in their dashes too, so that nothing depends on colour alone.
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")
_DARK_SERIES = " ".join(
    f".s{look} {{ stroke: {dark} }} .f{look} {{ fill: {dark} }}"
    for look, (_, dark) in enumerate(SERIES)
)
DARK_STYLE = (
    f"@media (prefers-color-scheme: dark) {{ .ink {{ fill: {DARK_INK} }} "
    f".muted {{ fill: {DARK_MUTED} }} .paper {{ fill: {DARK_PAPER} }} .band {{ fill: #303030 }} "
    f".cell {{ stroke: {DARK_PAPER} }} .axis {{ stroke: {DARK_MUTED} }} "
    f".grid {{ stroke: {DARK_GRID} }} .held {{ stroke: #e29bc4 }} {_DARK_SERIES} }}"
)
_FONT = "DejaVu Sans, Verdana, Arial, sans-serif"

# Beyond this ratio a linear scale shows the large values only.
_LOGARITHMIC_FROM = 20.0
# A curve with more points is drawn as the means of this many parts.
_MOST_POINTS = 500
# A curve with at most this many points has a mark at each.
_FEW_POINTS = 40
_LEGEND_ROW = 18


def element(tag: str, content: str = "", /, **attributes: float | str) -> str:
    """Returns an SVG element; `stroke_width` becomes `stroke-width`, and "" no attribute."""
    words = [tag]
    for name, value in attributes.items():
        if value == "":
            continue
        text = escape(value) if isinstance(value, str) else _coordinate(value)
        words.append(f"{name.rstrip('_').replace('_', '-')}='{text}'")
    opening = " ".join(words)
    return f"<{opening}>{content}</{tag}>" if content else f"<{opening}/>"


def _coordinate(value: float) -> str:
    """Writes a length with two decimals at most."""
    if isinstance(value, int):
        return str(value)
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def rect(
    x: float, y: float, width: float, height: float, content: str = "", /, **look: float | str
) -> str:
    """Returns a rectangle with a look, such as `fill` and `stroke`."""
    return element("rect", content, **look, x=x, y=y, width=width, height=height)


def text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    is_muted: bool = False,
    is_central: bool = False,
    **attributes: float | str,
) -> str:
    """Returns a line of text; `is_central` puts its middle at `y`, and not its base line."""
    look = {"class_": "muted", "fill": MUTED} if is_muted else {"class_": "ink", "fill": INK}
    if anchor != "start":
        look["text_anchor"] = anchor
    if is_central:
        look["dominant_baseline"] = "central"
    return element("text", escape(words), x=x, y=y, **(look | attributes))


def text_width(words: str) -> float:
    """Returns the pixels that text of the usual size takes, on the generous side."""
    return sum(11.0 if character in "MW" else 7.0 for character in words)


def line(
    x1: float, y1: float, x2: float, y2: float, content: str = "", /, **attributes: float | str
) -> str:
    """Returns a line in the colour of axes."""
    look = {"class_": "axis", "stroke": MUTED} | attributes
    return element("line", content, **look, x1=x1, y1=y1, x2=x2, y2=y2)


def tooltip(words: str) -> str:
    """Returns the content of an element that shows words when the pointer is on it."""
    return f"<title>{escape(words)}</title>"


def filled(look: int) -> dict[str, float | str]:
    """Returns the attributes of an area in the colour of a series."""
    return {"class_": f"f{look}", "fill": SERIES[look][0]}


def stroked(look: int, dash: int | None = None) -> dict[str, float | str]:
    """Returns the attributes of a curve in the colour and the dashes of a series."""
    attributes: dict[str, float | str] = {"class_": f"s{look}", "stroke": SERIES[look][0]}
    if dash is not None and _DASHES[dash]:
        attributes["stroke_dasharray"] = _DASHES[dash]
    return attributes


def picture(
    width: float, height: float, title: str, parts: Iterable[str], *, description: str = ""
) -> str:
    """Returns an SVG document; `description` says in words what it shows."""
    width, height = round(width), round(height)
    lines: list[str] = []
    named: dict[str, float | str] = {}
    if description:
        named = {"role": "img", "aria_label": f"{title}: {description}" if title else description}
        lines.append(f"<title>{escape(title)}</title><desc>{escape(description)}</desc>")
    lines += [
        f"<style>{DARK_STYLE}</style>",
        rect(0, 0, width, height, class_="paper", fill=PAPER),
    ]
    if title:
        lines.append(text(10, 20, title, font_size=14, font_weight="bold"))
    svg = element(
        "svg",
        "\n".join(["", *lines, *parts, ""]),
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        font_family=_FONT,
        font_size=11,
        **named,
    )
    return f"{svg}\n"


def scale_for(cells: Iterable[tuple[float, float]], negligible: float = 0.05) -> float:
    """Returns the least scale at which cells (room of their text, duration) have room."""
    # The briefest cells, which take a negligible share of the time, need no room: a measured step
    # has actions of a hundredth of the others' duration, and the drawing would be a hundred times
    # as wide.
    wishes = sorted(((room / time, time) for room, time in cells if time > 0), reverse=True)
    most = negligible * sum(time for _, time in wishes)
    passed = 0.0
    for wish, time in wishes:
        passed += time
        if passed > most:
            return wish
    return 0.0


def ticks(end: float, at_most: int) -> list[float]:
    """Returns values from 0 to `end`, in at most so many steps of 1, 2 or 5 times a power of 10."""
    if end <= 0:
        return [0.0]
    rough = end / at_most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(math.floor(end / step * (1 + 1e-9)) + 1)]


@dataclasses.dataclass(frozen=True)
class Scale:
    """A range of values, linear or logarithmic, with round numbers on it."""

    low: float
    high: float
    logarithmic: bool = False

    @classmethod
    def of(cls, values: Iterable[float], from_zero: bool = False) -> Scale:
        """Returns the scale that shows values best; `from_zero` makes it linear from 0."""
        numbers = list(values)
        low, high = (min(numbers), max(numbers)) if numbers else (0.0, 1.0)
        if from_zero:
            return cls(min(0.0, low), high if high > 0 else 1.0)
        if low > 0 and high / low > _LOGARITHMIC_FROM:
            return cls(low, high, logarithmic=True)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(low - room if low < 0 or low - room > 0 else 0.0, high + room)

    def share(self, value: float) -> float:
        """Returns the position of a value, from 0 at the lowest to 1 at the highest."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, at_most: int) -> list[float]:
        """Returns about `at_most` round values in ascending order."""
        if not self.logarithmic:
            step = (*ticks(self.high - self.low, at_most), self.high - self.low)[1]
            first = math.ceil(self.low / step - 1e-9)
            last = math.floor(self.high / step + 1e-9)
            return [index * step for index in range(first, last + 1)]
        first = math.floor(math.log10(self.low))
        last = math.ceil(math.log10(self.high))
        powers = [10.0**power for power in range(first, last + 1)]
        values: list[float] = []
        for factors in ((1, 2, 5), (1,)):
            values = [factor * power for power in powers for factor in factors]
            values = [v for v in values if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]
            if len(values) <= at_most:
                break
        return values[:: -(-len(values) // at_most) or 1]


def axis_below(
    y: float, left: float, right: float, marks: Iterable[tuple[float, str]], label: str = ""
) -> list[str]:
    """Draws a horizontal axis: a tick with its text at each mark, and a label at the left end."""
    parts = [line(left, y, right, y)]
    for x, words in marks:
        parts += [line(x, y, x, y + 4), text(x, y + 16, words, anchor="middle", is_muted=True)]
    return [*parts, text(left, y + 34, label, is_muted=True)] if label else parts


def grid(left: float, right: float, marks: Iterable[tuple[float, str]]) -> list[str]:
    """Draws horizontal lines across a plot, each with its text left of it."""
    parts: list[str] = []
    for y, words in marks:
        parts += [
            line(left, y, right, y, class_="grid", stroke=GRID),
            text(left - 8, y, words, anchor="end", is_muted=True, is_central=True),
        ]
    return parts


@dataclasses.dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    words: str
    # Draws the sign left of the text, at an x and at the middle of the row.
    sign: Callable[[float, float], str]
    room: float = 17  # pixels of the sign, with the gap behind it
    is_muted: bool = False  # the text is paler

    @property
    def width(self) -> float:
        """Pixels that the entry takes, with the gap behind it."""
        return self.room + text_width(self.words) + 14


def swatch(words: str, **attributes: float | str) -> Key:
    """Returns the entry of a legend for filled cells."""
    return Key(words, lambda x, y: rect(x, y - 6, 12, 12, **attributes))


def legend(keys: Iterable[Key], left: float, right: float) -> tuple[list[str], float]:
    """Draws a legend in as many rows as it needs, and returns the height of all but the first."""
    parts: list[str] = []
    x, y = left, 37.0
    for key in keys:
        if x > left and x + key.width > right:
            x, y = left, y + _LEGEND_ROW
        parts += [key.sign(x, y), text(x + key.room, y + 4, key.words, is_muted=key.is_muted)]
        x += key.width
    return parts, y - 37.0


Row = tuple[str, Sequence[tuple[int, float]], str]
"""The name of a row; the look and the length of each of its parts; the text behind it."""

BARS_WIDTH = 1200
_BARS_LEFT, _BARS_RIGHT, _BARS_TOP = 170, 150, 60
_BAR, _GAP = 22, 6


def bar_chart(
    title: str,
    rows: Sequence[Row],
    names: Sequence[str],
    *,
    write: Callable[[float], str],
    falling: bool = False,
) -> str:
    """Draws rows of bars on one scale, from the top down."""
    # `names` are those of the looks, for the legend; "" for one that needs none. If `falling`, a
    # row begins where the one before it ended, and not at 0.
    begins: list[float] = []
    ends: list[float] = []
    for _, parts, _ in rows:
        begins.append(ends[-1] if falling and ends else 0.0)
        ends.append(begins[-1] + sum(length for _, length in parts))
    scale = Scale.of([*begins, *ends], from_zero=True)
    right = BARS_WIDTH - _BARS_RIGHT

    def x_of(value: float) -> float:
        return _BARS_LEFT + (right - _BARS_LEFT) * scale.share(value)

    keys = [swatch(name, **filled(look)) for look, name in enumerate(names) if name]
    drawn, more = legend(keys, _BARS_LEFT, right)
    for number, (name, parts, behind) in enumerate(rows):
        y = _BARS_TOP + more + number * (_BAR + _GAP)
        middle = y + _BAR / 2
        drawn.append(text(_BARS_LEFT - 8, middle, name, anchor="end", is_central=True))
        end = begins[number]
        for look, length in parts:
            first, last = sorted((x_of(end), x_of(end + length)))
            kind = f", {names[look]}" if look < len(names) and names[look] else ""
            about = tooltip(f"{name}{kind}: {write(length)}")
            colours = {"class_": f"cell f{look}", "fill": SERIES[look][0], "stroke": PAPER}
            drawn.append(rect(first, y, last - first, _BAR, about, **colours))
            end += length
        furthest = max(x_of(begins[number]), x_of(end))
        drawn.append(text(furthest + 8, middle, behind, is_central=True))
    floor = _BARS_TOP + more + len(rows) * (_BAR + _GAP)
    marks = [(x_of(value), write(value)) for value in ticks(scale.high, 8)]
    drawn += axis_below(floor, _BARS_LEFT, right, marks)
    description = "; ".join(f"{name}: {behind}" for name, _, behind in rows)
    return picture(BARS_WIDTH, floor + 40, title, drawn, description=description)


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve."""

    name: str
    # A value by step, in ascending order; None breaks the curve.
    points: Sequence[tuple[int, float | None]]
    look: int = 0  # index of its colour in `SERIES`
    marks: bool = False  # Its points are drawn as rings, without a line between them.
    dash: int | None = None  # index of its dashes; by default that of its colour

    @property
    def values(self) -> list[float]:
        """Its finite values."""
        return [value for _, value in self.points if value is not None]

    @property
    def line_look(self) -> dict[str, float | str]:
        """The attributes of its line."""
        return stroked(self.look, self.look if self.dash is None else self.dash)

    def told(self, axis: str = "step") -> str:
        """Returns its first, last and lowest value in words."""
        known = [(step, value) for step, value in self.points if value is not None]
        if not known:
            return f"{self.name}: no finite value"
        (first, begin), (last, end) = known[0], known[-1]
        if len(known) == 1:
            return f"{self.name}: {short(end)} at {axis} {last:,}"
        step, lowest = min(known, key=lambda point: point[1])
        return (
            f"{self.name}: {short(begin)} at {axis} {first:,}, {short(end)} at {axis} {last:,}, "
            f"lowest {short(lowest)} at {axis} {step:,}"
        )


CURVES_WIDTH, CURVES_HEIGHT = 590, 310
_CURVES_LEFT, _CURVES_RIGHT, _CURVES_TOP, _CURVES_BOTTOM = 70, 16, 56, 44


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    until: int,
    notes: Sequence[tuple[int, str]] = (),
    scale: Scale | None = None,
    axis: str = "step",
    is_doubling: bool = False,
    width: int = CURVES_WIDTH,
    height: int = CURVES_HEIGHT,
) -> str:
    """Draws curves over the steps from 0 on, or over doubling numbers."""
    # `notes` are steps to be marked by a line, each with a word for it. If `is_doubling`, the axis
    # begins at the first step and is logarithmic, with a tick at each step of the first curve.
    # `height` is with one row of legend; further rows come on top.
    scale = scale or Scale.of(value for curve in series for value in curve.values)
    left, right = _CURVES_LEFT, width - _CURVES_RIGHT
    parts, more = legend(_curve_keys(series, notes), left, right)
    top, floor = _CURVES_TOP + more, height + more - _CURVES_BOTTOM
    if is_doubling:
        shown = [float(step) for step, _ in series[0].points]
        is_range = until > shown[0]
        steps = Scale(shown[0] if is_range else 0.0, float(until), logarithmic=is_range)
    else:
        steps = Scale(0.0, float(max(1, until)))
        shown = [value for value in steps.ticks(7) if value == int(value)]

    def x_of(step: float) -> float:
        return left + (right - left) * steps.share(step)

    def y_of(value: float) -> float:
        return floor - (floor - top) * min(1.0, max(0.0, scale.share(value)))

    parts += grid(left, right, [(y_of(value), short(value)) for value in scale.ticks(6)])
    label = f"{axis}{'; values on a logarithmic scale' if scale.logarithmic else ''}"
    parts += axis_below(floor, left, right, [(x_of(v), short(v)) for v in shown], label)
    for step, word in notes:
        about = tooltip(f"{word} at {axis} {step:,}")
        parts.append(line(x_of(step), top, x_of(step), floor, about, stroke_dasharray="3 3"))
    for curve in series:
        parts += _curve(curve, axis, x_of, y_of)
    description = "; ".join(curve.told(axis) for curve in series)
    return picture(width, height + more, title, parts, description=description)


def _curve(
    series: Series, axis: str, x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> list[str]:
    """Draws a curve, and the range of its values where it is a mean of them."""
    look = series.look
    parts: list[str] = []
    if series.marks:
        for step, value in series.points:
            if value is not None:
                about = tooltip(f"{series.name}, {axis} {step:,}: {short(value)}")
                parts.append(_ring(look, x_of(step), y_of(value), about))
        return parts
    for means in thinned(series.points):
        points = [(x_of(step), y_of(mean)) for step, mean, _, _ in means]
        if any(least < most for _, _, least, most in means):
            upper = [(x_of(step), y_of(most)) for step, _, _, most in means]
            lower = [(x_of(step), y_of(least)) for step, _, least, _ in means]
            area = _path([*upper, *reversed(lower)]) + "Z"
            parts.append(element("path", **filled(look), fill_opacity="0.18", d=area))
        if len(points) > 1:
            look_of_line = series.line_look | {"fill": "none", "stroke_width": 1.8}
            parts.append(element("path", **look_of_line, stroke_linejoin="round", d=_path(points)))
        if len(series.points) <= _FEW_POINTS or len(points) == 1:
            for (x, y), (step, mean, _, _) in zip(points, means, strict=True):
                about = tooltip(f"{series.name}, {axis} {step:,.0f}: {short(mean)}")
                parts.append(element("circle", about, **filled(look), cx=x, cy=y, r=2.6))
    return parts


def _path(points: Iterable[tuple[float, float]]) -> str:
    """Returns the path through points."""
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _ring(look: int, x: float, y: float, content: str = "") -> str:
    return element("circle", content, **stroked(look), cx=x, cy=y, r=5, fill="none", stroke_width=2)


Mean = tuple[float, float, float, float]
"""A step, and the mean, the least and the largest of the values around it."""


def thinned(
    points: Sequence[tuple[int, float | None]], most: int = _MOST_POINTS
) -> list[list[Mean]]:
    """Returns means over at most so many equal parts, split where a part has no numbers."""
    size = max(1, math.ceil(len(points) / most))
    pieces: list[list[Mean]] = [[]]
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        values = [value for _, value in part if value is not None]
        if not values:
            pieces.append([])
            continue
        step = (part[0][0] + part[-1][0]) / 2
        # Divided first: a sum may be beyond what a float holds.
        mean = math.fsum(value / len(values) for value in values)
        pieces[-1].append((step, mean, min(values), max(values)))
    return [piece for piece in pieces if piece]


def _curve_keys(series: Sequence[Series], notes: Sequence[tuple[int, str]]) -> list[Key]:
    """Returns the legend of curves, of rings and of lines across."""
    looks_of_lines = {curve.look for curve in series if not curve.marks}
    keys: list[Key] = []
    for curve in series:
        if not curve.marks:
            keys.append(Key(curve.name, _line_sign(curve.line_look), 27))
        elif curve.look not in looks_of_lines:
            # Otherwise a ring has the colour of its line, which is in the legend.
            keys.append(Key(curve.name, _ring_sign(curve.look), 27))
    for word in dict.fromkeys(word for _, word in notes):
        keys.append(Key(word, _note_sign, 12, is_muted=True))
    return keys


def _line_sign(look: dict[str, float | str]) -> Callable[[float, float], str]:
    return lambda x, y: element("line", **look, x1=x, y1=y, x2=x + 22, y2=y, stroke_width=2.2)


def _ring_sign(look: int) -> Callable[[float, float], str]:
    return lambda x, y: _ring(look, x + 10, y)


def _note_sign(x: float, y: float) -> str:
    return line(x + 4, y - 7, x + 4, y + 7, stroke_dasharray="3 3")
