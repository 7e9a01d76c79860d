"""Links between README files and guides lead to files and headings that exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/[!_]*/*.md", "[!.]*/**/README.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(text):
    """Headings, as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ +(.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    """The links of a page that lead nowhere."""
    for link in LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield link
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert list(broken_links(page)) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# A heading: `code`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-heading-code) [c](https://example.com/x) [d](none.md)\n"
        "[e](other.md#none) ![f](none.svg) [g](#here)\n"
        "## Here\n```\n[h](none.md)\n# there\n```\n[i](#there)\n"
    )
    assert list(broken_links(page)) == ["none.md", "other.md#none", "none.svg", "#there"]


def test_all_guides_are_looked_at():
    names = {str(path.relative_to(ROOT)) for path in PAGES}
    assert {"README.md", "docs/guides/plans.md", "pipemesh/lowering/README.md"} <= names
