"""Links between README files and guides lead to files and headings that exist."""

import re

from pipemesh.commands.main import HELP
from tests.docs.pages import FENCED, PAGES, ROOT, name_of, text_of

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text):
    """Headings, as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ +(.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    """The links of a page that lead nowhere."""
    for link in LINK.findall(FENCED.sub("", text_of(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists():
            yield link
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield link


def test_links_lead_somewhere():
    broken = {name_of(page): list(broken_links(page)) for page in PAGES}
    assert {"README.md", "docs/quickstart.ipynb", "pipemesh/lowering/README.md"} <= set(broken)
    assert {page: links for page, links in broken.items() if links} == {}


def test_tests_that_pages_name_exist():
    named = {
        found
        for page in PAGES
        for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text())
    }
    assert len(named) > 30
    missing = {
        (file, test)
        for file, test in named
        if f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    }
    assert missing == set()


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# A heading: `code`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-heading-code) [c](https://example.com/x) [d](none.md)\n"
        "[e](other.md#none) ![f](none.svg) [g](#here)\n"
        "## Here\n```\n[h](none.md)\n# there\n```\n[i](#there)\n"
    )
    assert list(broken_links(page)) == ["none.md", "other.md#none", "none.svg", "#there"]


def test_all_commands_are_documented():
    text = (ROOT / "docs/api/command_line.md").read_text(encoding="utf-8")
    assert set(re.findall(r"{command-help} (\w+)", text)) == set(HELP)


def test_figures_of_the_first_page_stand_in_the_pages_that_it_links():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]*\| \[([^\]]*)\]\((benchmarks/[^)]*)\) \|$", text, re.MULTILINE)
    assert len(rows) >= 5
    for told, page in rows:
        there = (ROOT / page).read_text(encoding="utf-8")
        assert [number for number in re.findall(r"\d[\d.,]*\d", told) if number not in there] == []


def test_no_page_advises_to_install_another_project():
    """`pipemesh` on the package index is not this library."""
    files = [*PAGES, *(ROOT / "pipemesh").rglob("*.py"), *(ROOT / "models").rglob("*.py")]
    advice = re.compile(r"pip install (?:-\w+ |--[\w-]+ )*['\"]?pipemesh(?![\w-])")
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            if advice.search(line):
                assert "not run" in line, f"{file}: {line}"


def test_modules_that_contributors_are_sent_to_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    modules = re.findall(r"`([\w/]+/\w+\.py)`", text)
    assert len(modules) > 40
    missing = [m for m in modules if not any((ROOT / top / m).exists() for top in ("", "pipemesh"))]
    assert missing == []
