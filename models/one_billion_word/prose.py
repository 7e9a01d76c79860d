"""English sentences inside reference documentation in plain text.

The pages of `pydoc_data.topics` are wrapped at 70 columns. Their sentences stand between tables,
grammar rules, signatures and interpreter sessions. Two filters select the prose. The first drops a
*paragraph* (lines between blank lines) if any line looks like code, grammar or a table. The second
keeps a *sentence* that consists mostly of ordinary words, starts with a capital or a quoted name,
and ends with a full stop or a colon.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# Marks of code, grammar, tables, rules and signatures; a line with one is never prose.
_NOT_PROSE = re.compile(
    r"::=|^\s*(?:>>>|\.\.\.|[|+=*^~-]{3}|[|+]|\(Pdb\)|#|@\w|\$ )|[|+]\s*$"
    r"|^\s*(?:def|class|import|from|for|while|if|else|try|except|with|return|raise)\b[^.]*:?\s*$"
    r"|^\s*\w+(?:\.\w+)* = "
)
_BULLET = re.compile(r"^\s*(?:[*\u2022-]|\d+\.|\[\d+\])\s+")
_FOOTNOTE_MARK = re.compile(r"\s*\[\d+\]")
# *emphasis* and **strong**; an asterisk beside a quote or inside a call is an operator.
_EMPHASIS = re.compile(r"(?<![\w*\"'])(\*{1,2})(\w[^*\"]*?)\1(?![\w*\"'])")
_WRAPPED_HYPHEN = re.compile(r"(?<=[a-z])-\n\s*(?=[a-z])")
_SPACES = re.compile(r"\s+")
# Characters around a sentence or a word: straight or curved quotes, and parentheses.
_OPEN = r"[(\"\u2018\u201c]*"
_CLOSE = r"[)\"\u2019\u201d]*"
_SENTENCE_END = re.compile(rf"[.?!]{_CLOSE}\s+(?={_OPEN}[A-Z])")
_ABBREVIATION = re.compile(rf"(?:\b(?:e\.g|i\.e|etc|vs|cf|ca|resp|approx|[A-Z])|\.\.)\.{_CLOSE}$")
_WHOLE = re.compile(rf"(?:{_OPEN}[A-Z]|\"\w).*[.?!:]{_CLOSE}")
# An ordinary word, or a quoted name such as "__init__()", with its punctuation.
_WORD = re.compile(
    rf"{_OPEN}(?:[A-Za-z]+(?:[-'\u2019/][A-Za-z]+)*|\"[\w.]+(?:\(\))?\"(?:\u2019s)?)"
    rf"{_CLOSE}[.,;:?!]*{_CLOSE}"
)

_FEWEST_WORDS = 5
_LEAST_SHARE_OF_WORDS = 0.7


def sentences(text: str) -> Iterator[str]:
    """Yields the English sentences of a documentation page, in order.

    Lines of a paragraph are joined; a word wrapped at its hyphen is joined without a space. Runs of
    whitespace become one space. Bullets, footnote marks and the asterisks of emphasis are removed.
    Quotes around names of the programming language stay.
    """
    for paragraph in re.split(r"\n\s*\n", text):
        for item in _items(paragraph.strip("\n")):
            if any(_NOT_PROSE.search(line) for line in item.split("\n")):
                continue
            for sentence in _split(_unmarked(item)):
                if _is_english(sentence):
                    yield sentence


def _items(paragraph: str) -> Iterator[str]:
    """Splits a paragraph before each bullet, and between a term and its definition."""
    item: list[str] = []
    indent = 0
    for line in paragraph.split("\n"):
        bullet = _BULLET.match(line)
        line_indent = bullet.end() if bullet else len(line) - len(line.lstrip())
        if item and (bullet or line_indent > indent):
            yield "\n".join(item)
            item = []
        item.append(_BULLET.sub("", line))
        indent = line_indent
    yield "\n".join(item)


def _unmarked(item: str) -> str:
    text = _WRAPPED_HYPHEN.sub("-", item)
    text = _SPACES.sub(" ", text).strip()
    text = _FOOTNOTE_MARK.sub("", text)
    return _EMPHASIS.sub(r"\2", text)


def _split(text: str) -> Iterator[str]:
    start = 0
    for match in _SENTENCE_END.finditer(text):
        sentence = text[start : match.end()].rstrip()
        if _ABBREVIATION.search(sentence):
            continue
        yield sentence
        start = match.end()
    yield text[start:]


def _is_english(sentence: str) -> bool:
    words = sentence.split(" ")
    if len(words) < _FEWEST_WORDS or not _WHOLE.fullmatch(sentence):
        return False
    ordinary = sum(1 for word in words if _WORD.fullmatch(word))
    return ordinary >= _LEAST_SHARE_OF_WORDS * len(words)
