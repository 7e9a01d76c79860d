"""A schedule as one self-contained web page."""

from __future__ import annotations

from collections.abc import Mapping

from pipemesh.schedule.render.axis import number
from pipemesh.schedule.render.memory import memory_to_svg
from pipemesh.schedule.render.palette import DARK_INK, DARK_MUTED, DARK_PAPER, INK, MUTED, PAPER
from pipemesh.schedule.render.svg import LEFT, RIGHT, escape, fitting_scale, to_svg
from pipemesh.schedule.timeline import Timeline

# A small screen shows the whole width, its margins and a scroll bar beside it.
_WIDTH = 1280 - 2 * 24 - 16 - LEFT - RIGHT
# But a page scrolls, so a long schedule may be wider.
_WIDEST = 12_000

_STYLE = (
    f"""
:root {{ color-scheme: light dark; }}
body {{ color: {INK}; background: {PAPER}; }}
th {{ color: {MUTED}; }}
#tip {{ background: {INK}; color: {PAPER}; }}
rect.cell:hover {{ stroke: #000; stroke-width: 2; }}
@media (prefers-color-scheme: dark) {{
  body {{ color: {DARK_INK}; background: {DARK_PAPER}; }}
  th {{ color: {DARK_MUTED}; }}
  #tip {{ background: {DARK_INK}; color: {DARK_PAPER}; }}
  rect.cell:hover {{ stroke: #fff; }}
}}
"""
    + """
body { font-family: 'DejaVu Sans', Verdana, Arial, sans-serif; font-size: 14px; margin: 24px; }
h1 { font-size: 20px; }
h2 { font-size: 16px; margin-top: 28px; }
.scroll { overflow-x: auto; }
/* The scroll bar of what is wider than a screen stays in view. */
@media screen { .long { overflow: auto; max-height: calc(100vh - 48px); } }
table { border-collapse: collapse; }
svg { display: block; }
p { overflow-wrap: anywhere; }
td, th { padding: 3px 14px 3px 0; text-align: right; font-weight: normal; }
td:first-child, th:first-child { text-align: left; }
#tip { position: fixed; display: none; pointer-events: none; padding: 6px 9px;
       border-radius: 4px; font-size: 12px; max-width: 320px; z-index: 1; }
"""
)

# The browser's own tooltip comes late and cannot be styled: take the titles out of the cells and
# show their text in a box that stays inside the window.
_SCRIPT = """
const tip = document.getElementById('tip');
for (const shape of document.querySelectorAll('svg rect.cell, svg path')) {
  const title = shape.querySelector('title');
  if (!title) continue;
  shape.dataset.tip = title.textContent;
  shape.setAttribute('aria-label', title.textContent);
  title.remove();
}
// The names of the rows stay in view.
for (const box of document.querySelectorAll('.scroll')) {
  const names = box.querySelectorAll('g.names');
  box.addEventListener('scroll', () => {
    for (const group of names) group.setAttribute('transform', `translate(${box.scrollLeft} 0)`);
  });
}
document.addEventListener('pointermove', event => {
  const text = event.target.dataset && event.target.dataset.tip;
  if (!text) { tip.style.display = 'none'; return; }
  tip.textContent = text;
  tip.style.display = 'block';
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(0, Math.min(event.clientX + 14, innerWidth - box.width - 4)) + 'px';
  const below = event.clientY + 18;
  const above = event.clientY - box.height - 8;
  tip.style.top = (below + box.height > innerHeight ? above : below) + 'px';
});
"""


def to_html(
    timeline: Timeline, *, title: str = "Pipeline schedule", measured: Timeline | None = None
) -> str:
    """Draws the schedule, the summary and the memory plot on one page.

    Hovering over a cell shows its stage, microbatch and times.

    Args:
        timeline: what to draw.
        title: the heading of the page.
        measured: what a real step took, in the same unit; shown below it, on the
            same scale.

    Returns:
        An HTML document that loads nothing from anywhere.

    Example:
        >>> from pipemesh.schedule import gpipe, simulate
        >>> to_html(simulate(gpipe(2, 2))).startswith("<!DOCTYPE html>")
        True
    """
    shown = {"": timeline} if measured is None else {"predicted": timeline, "measured": measured}
    # One scale and one end, so that what takes longer is longer.
    scale = fitting_scale(list(shown.values()), width=_WIDTH, widest=_WIDEST)
    until = max(each.makespan for each in shown.values())
    timelines = "\n".join(
        f"<h2>{'Timeline' + (f', {name}' if name else '')}</h2>\n"
        f"{to_svg(each, scale=scale, until=until)}"
        for name, each in shown.items()
    )
    devices = "\n".join(
        f"<h2>{'Devices' + (f', {name}' if name else '')}</h2>\n{_devices(each)}"
        for name, each in shown.items()
    )
    paths = "\n".join(
        f"<h2>{'Critical path' + (f', {name}' if name else '')}</h2>\n"
        f"<p>{' &rarr; '.join(str(span.action) for span in each.critical_path)}</p>"
        for name, each in shown.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{_summary(shown)}
<div class="scroll{" long" if until * scale > _WIDTH else ""}">
{timelines}
<h2>Memory{", predicted" if measured else ""}</h2>
{memory_to_svg(timeline, scale=scale, until=until)}</div>
{devices}
{paths}
<div id="tip" role="tooltip"></div>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _summary(shown: Mapping[str, Timeline]) -> str:
    """Facts about each timeline, one column each."""
    columns = [
        [
            ("devices", str(timeline.schedule.num_devices)),
            ("stages", str(timeline.schedule.num_stages)),
            ("microbatches", str(timeline.schedule.num_microbatches)),
            ("makespan", number(timeline.makespan)),
            (
                "bubble, all devices",
                f"{number(timeline.total_bubble)} ({timeline.bubble_ratio:.1%})",
            ),
            ("largest own-span bubble", number(max(timeline.own_span_bubble, default=0.0))),
            ("peak activations", str(max(timeline.peak_activations, default=0))),
        ]
        for timeline in shown.values()
    ]
    rows: list[str] = []
    if len(shown) > 1:
        rows.append(f"<tr><th></th>{''.join(f'<th>{name}</th>' for name in shown)}</tr>")
    for facts in zip(*columns, strict=True):
        cells = "".join(f"<td>{value}</td>" for _, value in facts)
        rows.append(f"<tr><th>{facts[0][0]}</th>{cells}</tr>")
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _devices(timeline: Timeline) -> str:
    rows = "\n".join(
        f"<tr><td>{device}</td><td>{number(timeline.busy[device])}</td>"
        f"<td>{number(timeline.bubble[device])}</td>"
        f"<td>{number(timeline.own_span_bubble[device])}</td>"
        f"<td>{timeline.peak_activations[device]}</td></tr>"
        for device in range(timeline.schedule.num_devices)
    )
    return f"""<table>
<tr><th>device</th><th>busy</th><th>bubble</th><th>own-span bubble</th>
<th>peak activations</th></tr>
{rows}
</table>"""
