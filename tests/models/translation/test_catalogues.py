"""Catalogues become pairs, and no held-out text is trained on."""

import shutil
import subprocess

import pytest
from babel.messages import Catalog
from babel.messages.mofile import write_mo

from models.translation import catalogues
from models.translation.catalogues import EmbeddedPairs, normalized, split
from pipemesh.errors import DataError, MissingPackageError

WORDS = ["open", "the", "new", "old", "file", "folder", "window", "now"]


def write(folder, language, messages, name="program"):
    """A catalogue of messages by their ids."""
    path = folder / language / "LC_MESSAGES" / f"{name}.mo"
    path.parent.mkdir(parents=True, exist_ok=True)
    catalogue = Catalog(locale=language)
    for key, text in messages.items():
        catalogue.add(key, text)
    with path.open("wb") as file:
        write_mo(file, catalogue)


@pytest.fixture
def folder(tmp_path):
    """Messages of one program in two languages, with some that copying would translate."""
    keys = [f"{a} {b}" for a in WORDS for b in WORDS]
    for language in ("de", "fr"):
        texts = {key: f"{language} {key}" for key in keys}
        texts |= {"same": "Plone", "price": f"{language} 3", "name": f"{language} ${{name}}"}
        texts |= {"long": f"{language} {'word ' * 20}", f"only {language}": language}
        write(tmp_path, language, texts)
    write(tmp_path, "fr", {"open the": "other"}, "another")
    return tmp_path


def read(path):
    return [tuple(line.split("\t")) for line in path.read_text().splitlines()]


def test_messages_of_one_id_are_a_pair(folder, tmp_path):
    told = catalogues.write([str(folder)], "de", "fr", str(tmp_path / "to"), 60)
    train, heldout = (read(tmp_path / "to" / name) for name in ("train.tsv", "heldout.tsv"))
    assert len({*train, *heldout}) == len(train) + len(heldout) == 64
    assert all(a.removeprefix("de") == b.removeprefix("fr") for a, b in train + heldout)
    assert told == f"{tmp_path}/to: {len(train)} pairs for training, {len(heldout)} pairs held out"
    catalogues.write([str(folder)], "en", "fr", str(tmp_path / "english"), 60)
    assert ("open the", "fr open the") in read(tmp_path / "english" / "train.tsv")
    with pytest.raises(DataError, match="0 pairs of 'de' and 'xx', too few to train on"):
        catalogues.write([str(folder)], "de", "xx", str(tmp_path / "to"), 60)


def test_files_of_other_languages_are_not_read(folder, monkeypatch):
    opened = []

    def noted(path, *args):
        opened.append(path)
        return open(path, *args)

    monkeypatch.setattr(catalogues, "open", noted, raising=False)
    assert catalogues.read(str(folder), ("de",))["de"]
    assert opened == [f"{folder}/de/LC_MESSAGES/program.mo"]


def test_a_plural_is_no_translation_of_a_singular(tmp_path):
    for language, forms in (("de", ("Datei", "Dateien")), ("fr", ("fichier", "fichiers"))):
        write(tmp_path, language, {("file", "files"): forms})
    german, french = catalogues.read(str(tmp_path), ("de", "fr")).values()
    assert list(catalogues.pairs_of(catalogues.english(german), german)) == [("file", "Datei")]
    both = [("Datei", "fichier"), ("Dateien", "fichiers")]
    assert list(catalogues.pairs_of(german, french)) == both


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
def test_a_debian_package_has_the_same_pairs(folder, tmp_path):
    root = tmp_path / "package"
    shutil.copytree(folder / "de", root / "usr/share/locale/de")
    shutil.copytree(folder / "fr", root / "usr/share/locale/fr")
    # A link into another package.
    (root / "usr/share/locale/de/LC_MESSAGES/link.mo").symlink_to("../../xx/LC_MESSAGES/other.mo")
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN" / "control").write_text(
        "Package: a\nVersion: 1\nArchitecture: all\nMaintainer: a\nDescription: a\n"
    )
    package = tmp_path / "a.deb"
    subprocess.run(["dpkg-deb", "-b", root, package], check=True, capture_output=True)
    languages = ("de", "fr")
    assert catalogues.read(str(package), languages) == catalogues.read(str(folder), languages)
    (tmp_path / "no.deb").write_text("no package")
    with pytest.raises(DataError, match=r"no\.deb' is neither a folder nor a Debian package"):
        catalogues.read(str(tmp_path / "no.deb"), languages)


def test_held_out_texts_are_never_trained_on(tmp_path):
    embedded = EmbeddedPairs(str(tmp_path), catalogues.HELDOUT, ("fr", "es"))
    folder = tmp_path / "pairs-fr-es"
    heldout = read(folder / embedded().rpartition("/")[2])
    train = read(folder / "train.tsv")
    assert len(train) > 1500 and 0.04 < len(heldout) / len(train) < 0.09
    sides = [{normalized(side) for pair in part for side in pair} for part in (train, heldout)]
    assert not sides[0] & sides[1]
    (folder / "train.tsv").write_text("kept")
    assert embedded() and (folder / "train.tsv").read_text() == "kept"


def test_pairs_that_share_a_text_stay_together():
    pairs = [("One,", "a"), ("one", "b"), ("two", "B."), ("three", "c")]
    for one_in in range(2, 30):
        parts = [{pair for pair in part} for part in split(pairs, one_in)]
        assert any(part >= set(pairs[:3]) for part in parts)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    catalogues._installed.cache_clear()
    monkeypatch.setattr(catalogues, "PACKAGE", "plone.app.missing")
    with pytest.raises(MissingPackageError, match=r"needs plone.app.missing, which is not instal"):
        EmbeddedPairs(str(tmp_path), catalogues.TRAIN, ("fr", "es"))()
    catalogues._installed.cache_clear()
