"""What pages are made of: tables, figures, and the page around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipemesh.report.chart import STYLE
from pipemesh.schedule.render.palette import (
    DARK_INK,
    DARK_MUTED,
    DARK_PAPER,
    DARK_STYLE,
    GRID,
    INK,
    MUTED,
    PAPER,
)
from pipemesh.schedule.render.svg import escape

# Letters of a word that may be broken.
_LONG = 30
_STYLE = f"""
:root {{ color-scheme: light dark; }}
body {{ color: {INK}; background: {PAPER}; }}
th, .note, figcaption, summary {{ color: {MUTED}; }}
td, th {{ border-bottom: 1px solid {GRID}; }}
{DARK_STYLE}
@media (prefers-color-scheme: dark) {{
  body {{ color: {DARK_INK}; background: {DARK_PAPER}; }}
  th, .note, figcaption, summary {{ color: {DARK_MUTED}; }}
  td, th {{ border-color: #4d4d4d; }}
}}
{STYLE}
body {{ font-family: 'DejaVu Sans', Verdana, Arial, sans-serif; font-size: 14px; margin: 24px;
       max-width: 1216px; }}
h1 {{ font-size: 22px; margin-bottom: 6px; overflow-wrap: anywhere; }}
h2 {{ font-size: 18px; margin: 34px 0 10px; }}
h3 {{ font-size: 15px; margin: 22px 0 8px; }}
p {{ overflow-wrap: anywhere; max-width: 860px; }}
.scroll {{ overflow-x: auto; }}
.two {{ display: flex; flex-wrap: wrap; gap: 20px 36px; align-items: flex-start; }}
figure {{ margin: 0; max-width: 100%; overflow-x: auto; }}
svg {{ display: block; max-width: max(100%, 440px); height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
td, th {{ padding: 4px 0 4px 22px; text-align: right; font-weight: normal; vertical-align: top; }}
td:first-child, th:first-child {{ padding-left: 0; }}
.flag {{ display: inline-block; max-width: 100%; overflow-wrap: anywhere; }}
.left {{ text-align: left; }}
.long {{ min-width: 140px; overflow-wrap: anywhere; }}
details {{ margin: 4px 0 0; }}
summary {{ cursor: pointer; font-size: 12px; }}
blockquote {{ margin: 10px 0; padding-left: 14px; border-left: 3px solid {GRID};
             white-space: pre-wrap; overflow-wrap: anywhere; max-width: 860px; }}
"""


def document(title: str, parts: Iterable[str]) -> str:
    """A page that loads nothing from anywhere.

    Args:
        title: its heading.
        parts: what it shows, as HTML.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{chr(10).join(part for part in parts if part)}
</body>
</html>
"""


def section(title: str, *parts: str) -> str:
    """A heading with what belongs below it; "" if that is nothing."""
    found = [part for part in parts if part]
    if not found:
        return ""
    return "\n".join(["<section>", f"<h2>{escape(title)}</h2>", *found, "</section>"])


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Rows of text.

    Args:
        head: the names of the columns.
        rows: as long as the head.
        left: the columns whose text begins at one place.

    Example:
        >>> table(["a", "b"], [["x", "1"]]).count("<td")
        2
    """

    def looks(number: int, cell: str) -> str:
        if number not in left:
            return ""
        # Only words that no screen has room for are broken.
        is_long = any(len(word) > _LONG for word in cell.split())
        return " class='left long'" if is_long else " class=left"

    def row(tag: str, cells: Sequence[str]) -> str:
        found = "".join(
            f"<{tag}{looks(number, cell)}"
            f"{' scope=col' if tag == 'th' else ''}>{escape(cell)}</{tag}>"
            for number, cell in enumerate(cells)
        )
        return f"<tr>{found}</tr>"

    lines = [row("th", head) if any(head) else "", *(row("td", each) for each in rows)]
    return "\n".join(["<div class=scroll><table>", *filter(None, lines), "</table></div>"])


def note(text: str) -> str:
    """A sentence beside what is shown."""
    return f"<p class=note>{escape(text)}</p>"


def figure(picture: str, behind: str = "", *, fold: str = "") -> str:
    """A picture with what belongs to it.

    Args:
        picture: an SVG element.
        behind: a sentence below it.
        fold: HTML below it that is shown when it is asked for.
    """
    caption = f"<figcaption>{escape(behind)}</figcaption>" if behind else ""
    folded = f"<details><summary>as a table</summary>{fold}</details>" if fold else ""
    return f"<figure>{picture}{caption}{folded}</figure>"


def side_by_side(parts: Iterable[str]) -> str:
    """As many beside each other as there is room for; "" if there are none."""
    found = "\n".join(parts)
    return f"<div class=two>\n{found}\n</div>" if found else ""
