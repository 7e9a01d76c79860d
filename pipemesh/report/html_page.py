"""HTML pages: skeleton, style, tables and figures; they load nothing, and are light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pipemesh.report.svg import (
    DARK_GRID,
    DARK_INK,
    DARK_MUTED,
    DARK_PAPER,
    GRID,
    INK,
    MUTED,
    PAPER,
)

# Words of more letters may be broken.
_LONG_WORD = 30
_STYLE = f"""
:root {{ color-scheme: light dark; }}
body {{ color: {INK}; background: {PAPER}; }}
th, .note, figcaption, summary {{ color: {MUTED}; }}
td, th {{ border-bottom: 1px solid {GRID}; }}
@media (prefers-color-scheme: dark) {{
  body {{ color: {DARK_INK}; background: {DARK_PAPER}; }}
  th, .note, figcaption, summary {{ color: {DARK_MUTED}; }}
  td, th {{ border-color: {DARK_GRID}; }}
}}
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


def document(title: str, parts: Iterable[str], *, style: str = "", script: str = "") -> str:
    """Returns a page with a heading and parts in HTML; `style` follows the rules of all pages."""
    content = "\n".join(part for part in parts if part)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_STYLE}{style}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{content}
{f"<script>{script}</script>" if script else ""}</body>
</html>
"""


def section(title: str, *parts: str) -> str:
    """Returns a heading with the parts below it; "" if all parts are empty."""
    shown = [part for part in parts if part]
    if not shown:
        return ""
    return "\n".join(["<section>", f"<h2>{escape(title)}</h2>", *shown, "</section>"])


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Returns a table of text; `left` has the columns that are aligned to the left."""

    def looks(number: int, cell: str) -> str:
        if number not in left:
            return ""
        # Only words that no screen has room for are broken.
        is_long = any(len(word) > _LONG_WORD for word in cell.split())
        return " class='left long'" if is_long else " class=left"

    def row(tag: str, cells: Sequence[str]) -> str:
        content = "".join(
            f"<{tag}{looks(number, cell)}"
            f"{' scope=col' if tag == 'th' else ''}>{escape(cell)}</{tag}>"
            for number, cell in enumerate(cells)
        )
        return f"<tr>{content}</tr>"

    lines = [row("th", head) if any(head) else "", *(row("td", cells) for cells in rows)]
    return "\n".join(["<div class=scroll><table>", *filter(None, lines), "</table></div>"])


def note(text: str) -> str:
    """Returns a sentence in small print."""
    return f"<p class=note>{escape(text)}</p>"


def figure(picture: str, caption: str = "", *, fold: str = "") -> str:
    """Returns a picture with a caption, and with a table that opens on a click (`fold`)."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    folded = f"<details><summary>as a table</summary>{fold}</details>" if fold else ""
    return f"<figure>{picture}{below}{folded}</figure>"


def side_by_side(parts: Iterable[str]) -> str:
    """Puts parts beside each other as far as there is room; "" if there are none."""
    content = "\n".join(parts)
    return f"<div class=two>\n{content}\n</div>" if content else ""
