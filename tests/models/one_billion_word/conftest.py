"""What the tests of the one-billion-word example share."""

import itertools

import pytest
from lingvo.core import py_utils

from models.one_billion_word import kind
from models.one_billion_word.corpus import embedded_corpus
from models.one_billion_word.vocabulary import load_vocabulary
from pipemesh.commands.runs import carry_out


@pytest.fixture(scope="session", autouse=True)
def user_caches(tmp_path_factory):
    """Copies of text are made nowhere else, by processes that tests start neither."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user")))
        yield


@pytest.fixture(scope="session")
def corpus():
    return embedded_corpus()


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def vocabulary(corpus, cache_dir):
    return load_vocabulary(corpus, 600, cache_dir)


@pytest.fixture(scope="session")
def folder(corpus, tmp_path_factory):
    """The embedded text as a folder: five training files of different lengths, two held out."""
    folder = tmp_path_factory.mktemp("folder")
    lines = iter(corpus.train.lines)
    for number in range(5):
        part = list(itertools.islice(lines, 30 * (number + 1)))
        (folder / f"train-{number}.txt").write_text("\n".join(part) + "\n", encoding="utf-8")
    for number, part in enumerate((corpus.heldout.lines[:20], corpus.heldout.lines[20:30])):
        (folder / f"heldout-{number}.txt").write_text("\n".join(part), encoding="utf-8")
    return str(folder)


@pytest.fixture
def train(monkeypatch):
    """The program after its command line: takes a request, returns the exit code."""
    monkeypatch.setattr(kind, "_start_devices", lambda _: None)
    py_utils.SetEagerMode(True, test_mode=True)
    monkeypatch.setattr(py_utils, "SetEagerMode", lambda _: None)

    def run(request):
        with kind.training_of(request) as made:
            return carry_out(*made)

    yield run
    monkeypatch.undo()
    py_utils.SetEagerMode(False, test_mode=True)
