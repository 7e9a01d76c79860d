"""An HTML page of documentation, and the English sentences on it."""

from __future__ import annotations

import html.parser
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.one_billion_word import prose

# What stands in these is no running text.
_SKIPPED = frozenset(
    "button footer head header math nav noscript option pre script select style svg "
    "textarea".split()
)
# Elements without an end, which would otherwise count as never closed.
_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())
# What is written within a line of text; any other element begins a paragraph and ends one.
_INLINE = frozenset(
    "a abbr acronym b bdi bdo big cite code del dfn em font i img ins kbd mark q s samp small span "
    "strike strong sub sup time tt u var wbr".split()
)
# The mark behind a headline that links to itself.
_PERMALINK = "\u00b6"
_SPACES = re.compile(r"\s+")
# Running English has "the" for every 15th to 20th word, other languages have none.
_WORDS_A_THE = 100


class _Paragraphs(html.parser.HTMLParser):
    """Collects the paragraphs of a page, each in one line."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._line: list[str] = []
        self._skipped: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped:
            # Of an element in itself, the inner end is not the end.
            if tag == self._skipped[-1]:
                self._skipped.append(tag)
        elif tag in _SKIPPED:
            self._skipped.append(tag)
            self.flush()
        elif tag not in _INLINE:
            self.flush()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _INLINE:
            self.flush()

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            if tag == self._skipped[-1]:
                self._skipped.pop()
        elif tag not in _INLINE and tag not in _VOID:
            self.flush()

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._line.append(data)

    def flush(self) -> None:
        line = _SPACES.sub(" ", "".join(self._line).replace(_PERMALINK, "")).strip()
        if line:
            self.paragraphs.append(line)
        self._line = []


def paragraphs(page: str) -> list[str]:
    """The paragraphs of an HTML page: running text between block elements, code left out.

    Example:
        >>> paragraphs("<p>One <b>bold</b>\\n word.<pre>x = 1</pre><ul><li>An item.</ul>")
        ['One bold word.', 'An item.']
    """
    parser = _Paragraphs()
    parser.feed(page)
    parser.close()
    parser.flush()
    return parser.paragraphs


def sentences(page: str) -> list[str]:
    """The English sentences on an HTML page, in order; none if it is in another language."""
    found = list(prose.sentences("\n\n".join(paragraphs(page))))
    words = [word for sentence in found for word in sentence.lower().split()]
    return found if words.count("the") * _WORDS_A_THE >= len(words) else []
