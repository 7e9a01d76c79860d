"""Which files a pattern means, in folders that grew somehow."""

import os

import pytest

from models.one_billion_word import text_folder
from models.one_billion_word.corpus import CorpusError, corpus_from_folder


def names(folder, pattern):
    return [os.path.relpath(path, folder) for path in text_folder.files(str(folder), pattern)]


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep er/d.txt", ".git/e.txt", "sub/f.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text\n")
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "sub/c.txt", "sub/deep er/d.txt"]),
        ("sub/**/*.txt", ["sub/c.txt", "sub/deep er/d.txt"]),
        ("**/deep*/**/*.txt", ["sub/deep er/d.txt"]),
        ("**", ["a.txt", "b.txt", "sub/c.txt", "sub/deep er/d.txt", "sub/f.md"]),
        ("*/c.txt", ["sub/c.txt"]),
        (".git/*", [".git/e.txt"]),
        ("[ab].txt", ["a.txt", "b.txt"]),
        ("sub", []),
        ("missing/**/*.txt", []),
    ],
)
def test_patterns(tree, pattern, found):
    assert names(tree, pattern) == found


def test_links_that_lead_back_are_followed_once(tree):
    """With two of them `glob` had 2^40 paths to look at."""
    (tree / "sub" / "up").symlink_to(tree)
    (tree / "sub" / "deep er" / "up").symlink_to(tree / "sub")
    assert names(tree, "**/*.txt") == ["a.txt", "b.txt", "sub/c.txt", "sub/deep er/d.txt"]


def test_links_lead_elsewhere_and_a_file_of_two_names_is_read_once(tree, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "g.txt").write_text("text\n")
    (tree / "linked").symlink_to(elsewhere)
    (tree / "again.txt").symlink_to(tree / "a.txt")
    assert names(tree, "*.txt") == ["a.txt", "b.txt"]
    assert names(tree, "linked/*") == ["linked/g.txt"]
    assert "linked/g.txt" in names(tree, "**/*.txt")


@pytest.mark.parametrize("pattern", ["*", "**/*", "train"])
def test_what_is_matched_and_is_no_file_is_told(tree, pattern):
    (tree / "train").symlink_to(tree / "unmounted")
    with pytest.raises(CorpusError, match=r"train' is a link to nothing; take it away"):
        text_folder.files(str(tree), pattern)
    (tree / "train").unlink()
    os.mkfifo(tree / "train")
    with pytest.raises(CorpusError, match=r"train' is no file of text; take it away"):
        text_folder.files(str(tree), pattern)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_text_that_is_there_packed_and_unpacked_is_told(tree, ending):
    """As `gunzip --keep` leaves it; it was trained on twice as often as the rest."""
    (tree / f"b.txt{ending}").write_text("text\n")
    assert names(tree, "*.txt") == ["a.txt", "b.txt"]
    with pytest.raises(CorpusError, match=rf"b.txt' is there twice, .* as '.*b.txt{ending}'; take"):
        text_folder.files(str(tree), "*")


def test_a_folder_that_cannot_be_listed_is_told(tree, monkeypatch):
    real = os.scandir

    def scandir(path="."):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(CorpusError, match=r"sub' cannot be read \(Permission denied\)"):
        text_folder.files(str(tree), "**/*.txt")

    def listdir(path="."):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(CorpusError, match=r"cannot be read \(Permission denied\)"):
        text_folder.check(str(tree))


def test_names_of_any_bytes(tmp_path):
    folder = tmp_path / "a\udcff\nb [1]*"
    folder.mkdir()
    odd = ["plain", "with space", "[x]", "new\nline", "not\udcfeutf8", "~", "$HOME", "-n", "a:b"]
    for number, name in enumerate(odd):
        (folder / name).write_text(f"text {number}\n")
    (folder / "held out").write_text("judge\n")
    corpus = corpus_from_folder(str(folder), "[!h]*", "held out")
    assert sorted(corpus.train) == sorted(f"text {number}" for number in range(len(odd)))
    assert corpus.name.isprintable(), "it is printed"


@pytest.mark.slow
def test_ten_thousand_files(tmp_path):
    for number in range(10_000):
        (tmp_path / f"train-{number}").write_bytes(b"" if number % 7 == 0 else b"a line of text\n")
    (tmp_path / "heldout").write_text("judge\n")
    corpus = corpus_from_folder(str(tmp_path), "train-*", "heldout")
    assert len(corpus.train.paths) == 10_000 - 1429, "those with text"
    assert len(list(corpus.train.sample(3000))) == 3000
    assert len(corpus.train.digest()) == 64
