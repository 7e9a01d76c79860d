"""A corpus: training and held-out text, its sentences, and the unigram model."""

import collections
import gzip
import math
import re

import numpy as np
import pytest
from backports import zstd

from models.one_billion_word import prose
from models.one_billion_word.corpus import (
    CorpusError,
    Sentences,
    TextFiles,
    clean,
    corpus_from_folder,
    embedded_corpus,
    load_corpus,
)
from models.one_billion_word.input import heldout_dataset
from models.one_billion_word.unigram import fit_unigram
from pipemesh.errors import PipemeshError


def test_the_embedded_text_is_english_sentences_each_once_and_the_same_every_time(corpus):
    train, heldout = set(corpus.train), set(corpus.heldout)
    assert not train & heldout
    assert len(train) == len(corpus.train.lines) and len(heldout) == len(corpus.heldout.lines)
    assert 0.05 < len(heldout) / (len(train) + len(heldout)) < 0.12
    lines = corpus.train.lines
    assert len(lines) > 1500
    assert sum(map(len, lines)) > 150_000
    text = " ".join(lines)
    assert text.lower().count(" the ") / len(text.split()) > 0.04
    for line in lines:
        assert line == clean(line)
        assert re.fullmatch(r"[^\n\t]+[.?!:][)\"\u2019\u201d]*", line), line
        assert "  " not in line and "::=" not in line and ">>>" not in line
    assert embedded_corpus() == load_corpus() == load_corpus("") == corpus
    assert embedded_corpus().train.digest() == corpus.train.digest()
    assert corpus.heldout.digest() != corpus.train.digest()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (" two  spaces stay inside \r\n", "two  spaces stay inside"),
        ("\u2581marks\u2581are spaces", "marks are spaces"),
        ("\u00a0no ASCII, so it stays\u3000", "\u00a0no ASCII, so it stays\u3000"),
        (" \t\v\f\r\n", ""),
        ("carriage\rreturns go \r", "carriagereturns go"),
    ],
)
def test_clean(line, sentence):
    assert clean(line) == sentence


def test_files_are_read_line_by_line(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"one \r\n\n  \ntwo\rstill two\xff\n\xe2\x96\x81three")
    text = TextFiles((str(path),))
    assert list(text) == ["one", "twostill two\ufffd", "three"]
    assert list(text) == list(text), "it can be read again"


def test_a_sample_takes_from_every_file(tmp_path):
    paths = []
    for name, lines in (("a", 10), ("b", 1), ("c", 10)):
        paths.append(str(tmp_path / name))
        (tmp_path / name).write_text("".join(f"{name}{line}\n" for line in range(lines)))
    text = TextFiles(tuple(paths))
    # The one with a line leaves what it lacks to the others.
    assert list(text.sample(5)) == ["b0", "a0", "a1", "c0", "c1"]
    assert list(text.sample(1)) == ["c0"]
    assert len(list(text.sample(1000))) == 21
    assert list(Sentences(("x", " ", "y", "z")).sample(2)) == ["x", "y"]


def test_the_digest_of_files_knows_content_and_not_the_folder(tmp_path):
    texts = []
    for folder, content in (("a", "same"), ("b", "same"), ("c", "else")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text").write_text(content)
        texts.append(TextFiles((str(tmp_path / folder / "text"),)))
    digests = [text.digest() for text in texts]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("ending", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zstd.compress)]
)
def test_the_layout_of_the_benchmark_needs_no_pattern(tmp_path, ending, pack):
    train = tmp_path / "training-monolingual.tokenized.shuffled"
    heldout = tmp_path / "heldout-monolingual.tokenized.shuffled"
    for folder in (train, heldout):
        folder.mkdir()
    for part in (2, 1):
        path = train / f"news.en-{part:05}-of-00100{ending}"
        path.write_bytes(pack(b"train %d\n" % part))
        path = heldout / f"news.en.heldout-{part:05}-of-00050{ending}"
        path.write_bytes(pack(b"heldout %d\n" % part))
    (train / "README").write_text("not this\n")
    (train / "news.en-00001-of-00100~").write_text("nor this\n")
    corpus = corpus_from_folder(str(tmp_path))
    assert list(corpus.train) == ["train 1", "train 2"]
    assert list(corpus.heldout) == ["heldout 1", "heldout 2"]


def test_patterns_cross_folders_and_blank_files_are_left_out(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a.txt").write_text("a\n")
    (tmp_path / "deep" / "b.txt").write_text(" \n\n")
    (tmp_path / "heldout").write_text("c\n")
    corpus = corpus_from_folder(str(tmp_path), "**/*.txt", "heldout")
    assert list(corpus.train) == ["a"]
    assert len(corpus.train.paths) == 1


def test_load_corpus_takes_a_folder_and_patterns_need_one(folder):
    assert load_corpus(folder, "train-*", "heldout-*").name == folder
    for flag, patterns in (("train", ("*.txt", None)), ("heldout", (None, "*.txt"))):
        told = rf"--{flag}_pattern='\*\.txt' needs a folder.*--data_d"
        with pytest.raises(CorpusError, match=told):
            load_corpus(None, *patterns)


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("a\n")
    (tmp_path / "other").write_text("b\n")
    (tmp_path / "blank").write_text(" \n\n")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    (tmp_path / "hard link").hardlink_to(tmp_path / "text")
    return tmp_path


@pytest.mark.parametrize(
    ("folder", "train", "heldout", "match"),
    [
        ("missing", None, None, r"--data_dir='.*missing' does not exist; give a folder"),
        ("text", None, None, r"--data_dir='.*text' is a file; give a folder"),
        ("empty", None, None, r"--data_dir='.*empty' is empty; give a folder"),
        (".", None, None, r"--train_pattern='training-.*' \(the default\) matches no file in --"),
        (".", "*.txt", "text", r"--train_pattern='\*\.txt' matches no file in --data_dir="),
        (".", "empty", "text", r"--train_pattern='empty' matches no file in --data_dir="),
        (".", "text", None, r"--heldout_pattern='heldout-.*' \(the default\) matches no file"),
        (".", "text", "*.txt", r"--heldout_pattern='\*\.txt' matches no file"),
        (".", "blank", "text", r"--train_pattern='blank' matches no text .* 1 file\(s\), all b"),
        (".", "text", "b*", r"--heldout_pattern='b\*' matches no text"),
        (".", "*", "text", r"--heldout_pattern='text' matches '.*text', which --train_pattern="),
        (".", "link", "text", r"--heldout_pattern='text' matches '.*text', which --train_pat"),
        (".", "hard*", "text", r"--heldout_pattern='text' matches '.*text', which --train_pat"),
    ],
)
def test_a_folder_that_cannot_serve(texts, folder, train, heldout, match):
    with pytest.raises(CorpusError, match=match) as error:
        corpus_from_folder(str(texts / folder), train, heldout)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, PipemeshError) and isinstance(error.value, ValueError)


PAGE = """The "with" statement
********************

The "with" statement is used to wrap the execution of a *block* with
methods defined by a context manager, see PEP 343 for the read-
only history. This allows common patterns, e.g. A "try", to be
encapsulated for reuse. [1]

   with_stmt ::= "with" ( "(" with_stmt_contents ","? ")"
                 | with_stmt_contents ) ":" suite

The following code:

   with EXPRESSION as TARGET:
       SUITE

   >>> print("This is the output of a very ordinary call.")
   This is one line of text without its end

* The **first** item of the list is a sentence.

  It has a second paragraph of its own.
* The second item is one as well.

object.__enter__(self)
   Enter the runtime context related to this object.

+--------------------------------+
| This is a cell of the table.   |
+--------------------------------+
"""


def test_a_page_becomes_its_sentences():
    assert list(prose.sentences(PAGE)) == [
        'The "with" statement is used to wrap the execution of a block with methods defined by '
        "a context manager, see PEP 343 for the read-only history.",
        'This allows common patterns, e.g. A "try", to be encapsulated for reuse.',
        "The first item of the list is a sentence.",
        "It has a second paragraph of its own.",
        "The second item is one as well.",
        "Enter the runtime context related to this object.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n\n",
        "Too short here.",
        "without a capital this is no sentence.",
        "This one does not end with a full stop",
        "A x[1] + y[2] == z(3) % 4 is mostly code.",
        "@decorator stands before a function and is code.",
    ],
)
def test_what_is_no_sentence(text):
    assert list(prose.sentences(text)) == []


def test_it_counts_and_smooths(vocabulary):
    text = Sentences(("the the", "the"))
    model = fit_unigram(text, vocabulary, alpha=0.5)
    (the,) = vocabulary.encode("the")
    outcomes = vocabulary.size - 1
    assert math.exp(-model.nats[the]) == pytest.approx(3.5 / (5 + 0.5 * outcomes))
    assert math.exp(-model.nats[vocabulary.eos_id]) == pytest.approx(2.5 / (5 + 0.5 * outcomes))
    assert model.nats[vocabulary.bos_id] == math.inf
    assert np.exp(-model.nats).sum() == pytest.approx(1.0)


def test_it_scores_exactly_the_held_out_tokens_whatever_rows_and_batches(corpus, vocabulary):
    model = fit_unigram(corpus.train, vocabulary)
    score, other = (
        model.score(heldout_dataset(corpus, vocabulary, batch_size=batch, sequence_length=length))
        for batch, length in ((3, 70), (8, 13))
    )
    assert other.nats == pytest.approx(score.nats)
    assert (other.tokens, other.words, other.bytes) == (score.tokens, score.words, score.bytes)
    counts = collections.Counter()
    for ids in vocabulary.encode_all(corpus.heldout):
        counts.update([*ids, vocabulary.eos_id])
    assert score.tokens == sum(counts.values())
    assert score.bytes == sum(len(sentence.encode()) + 1 for sentence in corpus.heldout)
    assert score.words == sum(len(sentence.split()) + 1 for sentence in corpus.heldout)
    assert score.nats == pytest.approx(sum(n * model.nats[piece] for piece, n in counts.items()))
    assert 1.5 < score.bits_per_byte < 3.5


def test_it_stops_after_enough_tokens(vocabulary):
    def lines():
        yield from ["the"] * 5000
        raise AssertionError("read on")

    assert fit_unigram(lines(), vocabulary, max_tokens=8000).nats[vocabulary.eos_id] < 1


@pytest.mark.parametrize("alpha", [0, -1, math.nan])
def test_every_token_needs_some_probability(vocabulary, alpha):
    with pytest.raises(ValueError, match=f"alpha is {alpha}; above 0"):
        fit_unigram(Sentences(("a",)), vocabulary, alpha=alpha)
