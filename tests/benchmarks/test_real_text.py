"""A text of the manuals in packages: English, each sentence once, split by pages."""

import json
import pathlib
import shutil
import subprocess

import pytest

PAGE = """<!DOCTYPE html><html><head><title>The title of the page.</title></head><body>
<nav><p>The way to the next chapter is here.</p></nav>
<h1>The heading of this page<a>\u00b6</a></h1>
<p>The <code>tar</code> command
   packs <em>all</em> files of the folder.</p>
<pre>The output of this program is left out.</pre>
<ul><li>The first item is a sentence.<li>The second item is one as well.</ul>
<script>The script is also left out here.</script><svg><svg></svg>The drawing is as well.</svg>
</body></html>"""
SENTENCES = [
    "The tar command packs all files of the folder.",
    "The first item is a sentence.",
    "The second item is one as well.",
]


@pytest.fixture
def real_text(modules_of):
    page, make = modules_of("real_text", "page", "make")
    return page, make


def test_sentences_of_a_page(real_text):
    page, _ = real_text
    assert page.sentences(PAGE) == SENTENCES


def test_pages_in_other_languages_are_left_out(real_text):
    page, _ = real_text
    assert page.sentences("<p>Das ist ein Satz auf einer Seite.<p>Und das ist noch einer.") == []


def test_a_sentence_stays_on_the_first_page_that_has_it(real_text):
    _, make = real_text
    pages = [
        make.Page("a", "1", ("See chapter 3 of it.", "The rest.")),
        make.Page("a", "2", ("see Chapter 14, of it!",)),
        make.Page("b", "1", ("The rest.", "More of it.")),
    ]
    found = list(make.without_repetitions(pages))
    assert found == list(make.without_repetitions(reversed(pages)))
    assert sorted(make.same(s) for one in found for s in one.sentences) == sorted(
        {make.same(s) for one in pages for s in one.sentences}
    )


def test_pages_are_held_out_whole(real_text, tmp_path):
    _, make = real_text
    pages = [make.Page("a", str(n), (f"Page {n} begins.", f"Page {n} ends.")) for n in range(500)]
    counts = make.write(pages, tmp_path)
    heldout = (tmp_path / "heldout-00.txt").read_text().splitlines()
    train = [
        line
        for path in sorted(tmp_path.glob("train-*.txt"))
        for line in path.read_text().splitlines()
    ]
    assert 2 <= counts["heldout"]["pages"] <= 25
    assert len(heldout) == 2 * counts["heldout"]["pages"] == counts["heldout"]["sentences"]
    assert len(train) == counts["train"]["sentences"] == 1000 - len(heldout)
    assert heldout[::2] == [line.replace("ends", "begins") for line in heldout[1::2]]
    assert counts["a"]["bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="no Debian")
def test_reads_a_package(real_text, tmp_path, monkeypatch):
    """As downloaded before, so that nothing is fetched."""
    _, make = real_text
    monkeypatch.setattr(make, "PACKAGES", {"manual": "/en/"})
    tree, packages = tmp_path / "tree", tmp_path / "packages"
    files = {
        "DEBIAN/control": "Package: manual\nVersion: 1:2\nArchitecture: all\n"
        "Maintainer: A <a@b>\nDescription: a manual\n",
        "usr/share/doc/manual/copyright": "Format: 1.0\n\nFiles: *\nLicense: GFDL\n\n"
        "Files: x\nLicense: Expat\n",
        "usr/share/doc/manual/en/index.html": PAGE,
        "usr/share/doc/manual/de/index.html": PAGE,
        "usr/share/doc/manual/en/index.txt": PAGE,
    }
    for name, text in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    packages.mkdir()
    archive = packages / "manual_1%3a2_all.deb"
    subprocess.run(["dpkg-deb", "--build", tree, archive], check=True, capture_output=True)
    assert make.fetch(["manual"], packages) == [str(archive)]
    pages, licences = make.read_package(str(archive))
    assert [one.sentences for one in pages] == [tuple(SENTENCES)]
    assert [pathlib.Path(one.path).parent.name for one in pages] == ["en"]
    assert licences == ["Expat", "GFDL"]
    summary = make.summary_of([str(archive)], [(pages, licences)], make.write(pages, tmp_path))
    assert json.loads(json.dumps(summary)) == summary
    assert summary["packages"]["manual"]["version"] == "1:2"
    assert summary["packages"]["manual"]["sentences"] == 3
