"""Unusual text: odd, huge, or changing while it is read."""

import gzip
import itertools
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from backports import zstd

from models.one_billion_word import input as datasets
from models.one_billion_word import metrics
from models.one_billion_word.corpus import Corpus, Sentences, TextFiles, corpus_from_folder
from models.one_billion_word.input import heldout_dataset, train_dataset
from models.one_billion_word.unigram import fit_unigram
from models.one_billion_word.vocabulary import train_vocabulary
from pipemesh.checkpoint import newest
from pipemesh.data import text_file
from pipemesh.data.text_file import LONGEST_LINE
from tests.models.one_billion_word.program import refused
from tests.models.one_billion_word.small_training import scalars, small_request
from tests.models.one_billion_word.test_input import read_sentences

SIZES = {"batch_size": 2, "sequence_length": 64}
LONG = {"sequence_length": 1024}
LINES = [f"sentence number {number}" for number in range(600)]
TEXT = "\n".join(LINES).encode()

ODD = {
    "one long line": b"ab c " * 60_000,
    "a long line without a space": b"\xe2\x82\xac" * 50_000,
    "a flood of empty lines": b"one" + b"\n" * (1 << 22) + b"two\n" + b" \r\n" * 99,
    "zero bytes": TEXT.replace(b"number 7", b"number\x007"),
    "bytes that are no UTF-8": TEXT.replace(b"number 7", b"number \xff\xe2\x28\xed\xa0\x80 7"),
    "returns before newlines": TEXT.replace(b"\n", b"\r\n"),
    "a mark at the head": b"\xef\xbb\xbf" + TEXT,
    "one line without a newline": b"only this",
    "control characters": TEXT.replace(b"number 7", b"\x01\x1b[0m\x7f \t\v\f\x85 7"),
    "marks of SentencePiece": TEXT.replace(b"number 7", "\u2581 \u2585 \u2047 <s> <0x41>".encode()),
}
PACKED = {"plain": bytes, "gzip": gzip.compress, "zstd": zstd.compress}


def write(folder, name, content):
    (folder / name).write_bytes(content)
    return str(folder / name)


@pytest.mark.parametrize("packed", PACKED)
def test_tensorflow_reads_what_python_reads(packed, vocabulary, tmp_path):
    paths = []
    for kind, content in ODD.items():
        paths.append(write(tmp_path, kind, PACKED[packed](content)))
        text_file.check_head(paths[-1])
        assert any(TextFiles((paths[-1],))), kind
    text = TextFiles(tuple(paths))
    dataset = heldout_dataset(Corpus("odd", text, text), vocabulary, batch_size=9, **LONG)
    read = list(read_sentences(dataset, vocabulary))
    assert read == list(text)
    assert max(len(line.encode()) for line in read) <= text_file.LONGEST_LINE


# Of the last one SentencePiece skipped every line, and there was nothing to learn from.
@pytest.mark.parametrize("part", ["\x00", "\ufffd", "\t <s>", "\u2585"])
def test_a_vocabulary_is_learned_of_text_all_of_whose_lines_are_odd(part, corpus):
    lines = corpus.train.lines[:200]
    plain = train_vocabulary(Sentences(lines), 400)
    odd = train_vocabulary(Sentences(tuple(f"{line} {part}" for line in lines)), 400)
    assert odd.decode(odd.encode(part)) == part
    assert len(odd.encode(lines[0])) <= len(plain.encode(lines[0])) + 2


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    rng = random.Random(0)
    for number in range(3):
        lines = rng.sample(LINES, 200)
        (folder / f"train-{number}").write_text("\n".join(lines))
    (folder / "heldout").write_text("\n".join(LINES[:9]))
    return folder


def batches(folder, vocabulary):
    corpus = corpus_from_folder(str(folder), "train-*", "heldout")
    return iter(train_dataset(corpus, vocabulary, seed=1, **SIZES))


def read_on(batches, number=999):
    for _ in range(number):
        next(batches)


def truncate(path):
    os.truncate(path, 100)


def replace(path):
    other = path.with_name("other")
    other.write_text("something else\n" * 300)
    other.rename(path)


def append(path):
    with path.open("a") as file:
        file.write("\none line more")


@pytest.mark.parametrize("change", [truncate, replace, append])
def test_a_file_that_changes_while_it_is_trained_on_ends_it(folder, vocabulary, change):
    iterator = batches(folder, vocabulary)
    read_on(iterator, 3)
    change(folder / "train-1")
    with pytest.raises(tf.errors.OpError, match=r"train-1' says something else than when training"):
        read_on(iterator)


def test_a_long_file_is_looked_at_when_it_was_read(folder, vocabulary, monkeypatch):
    """It was cut while it was open, and what was left was taken for all of it until it was opened
    for the next time."""
    monkeypatch.setattr(datasets, "_BUFFER", 1 << 10)
    monkeypatch.setattr(datasets, "BLOCK_LINES", 8)
    for number in (1, 2):
        (folder / f"train-{number}").unlink()
    iterator = batches(folder, vocabulary)
    next(iterator)
    truncate(folder / "train-0")
    # An epoch has as many batches and more.
    left = 200 * len(vocabulary.encode(LINES[0])) // (2 * 64) - 1
    with pytest.raises(tf.errors.OpError, match=r"train-0' says something else"):
        read_on(iterator, left)


def test_an_archive_that_is_damaged_behind_its_head_is_answered_in_a_line(folder):
    whole = zstd.compress(b"".join(b"%d\n" % number for number in range(99_999)))
    (folder / "train-1").write_bytes(whole[: len(whole) * 3 // 4])
    flags = (f"--data_dir={folder}", "--train_pattern=train-*", "--heldout_pattern=heldout")
    line = refused(*flags, f"--logdir={folder / 'run'}")
    assert "train-1' is a damaged" in line and line.endswith("; pack it again")


def test_text_may_be_touched_or_replaced_by_the_same_and_a_copy_is_read(folder, vocabulary):
    """Packed text is read from its copy, whatever becomes of the file."""
    expected = batches(folder, vocabulary)
    read_on(expected, 300)
    wanted = next(expected)["ids"]
    iterator = batches(folder, vocabulary)
    read_on(iterator, 3)
    os.utime(folder / "train-0", (1, 1))
    (folder / "same").write_bytes((folder / "train-1").read_bytes())
    (folder / "same").rename(folder / "train-1")
    read_on(iterator, 297)
    np.testing.assert_array_equal(next(iterator)["ids"], wanted)
    for path in folder.glob("train-*"):
        path.write_bytes(zstd.compress(path.read_bytes()))
    iterator = batches(folder, vocabulary)
    read_on(iterator, 3)
    (folder / "train-0").unlink()
    truncate(folder / "train-1")
    read_on(iterator, 297)
    np.testing.assert_array_equal(next(iterator)["ids"], wanted)


@pytest.mark.parametrize("name", ["gone", "gone\udcff\n[1]"])
def test_a_file_that_vanishes_is_named_whatever_its_name(folder, vocabulary, name):
    (folder / "train-1").rename(folder / f"train-{name}")
    iterator = batches(folder, vocabulary)
    read_on(iterator, 3)
    (folder / f"train-{name}").unlink()
    with pytest.raises(tf.errors.OpError, match=r"train-gone.*No such file"):
        read_on(iterator)


def test_a_copy_that_is_damaged_while_it_is_read_ends_it(folder, vocabulary, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    path = folder / "train-1"
    path.write_bytes(zstd.compress(path.read_bytes()))
    iterator = batches(folder, vocabulary)
    read_on(iterator, 3)
    (copy,) = (tmp_path / "caches" / "pipemesh" / "text").iterdir()
    truncate(copy)
    with pytest.raises(tf.errors.OpError, match=r"train-1' says something else .* what is read of"):
        read_on(iterator)
    # Whoever starts again has it made again.
    read_on(batches(folder, vocabulary), 300)


def test_the_unigram_model_takes_long_lines_a_few_at_a_time(vocabulary):
    sizes = []
    real = vocabulary.encode_all

    class Counting:
        size, eos_id, bos_id = vocabulary.size, vocabulary.eos_id, vocabulary.bos_id

        def encode_all(self, sentences):
            sizes.append(sum(map(len, sentences)))
            return real(sentences)

    fit_unigram(itertools.repeat("ab c " * 10_000, 100), Counting())
    assert sum(sizes) == 100 * 50_000 and max(sizes) < (1 << 18) + 50_000


def protein(rng):
    lines = ("".join(rng.choice("ACDEFGHIKLMNPQRSTVWY") for _ in range(300)) for _ in range(40))
    return "\n".join(lines).encode()


@pytest.mark.slow
def test_a_training_on_odd_text_ends_well(tmp_path, train, capfd, monkeypatch):
    """No figure that is only reported ends it, such as a perplexity beyond a float32."""
    rng = random.Random(0)
    for name in ("train", "heldout"):
        (tmp_path / name).write_bytes(protein(rng))
    monkeypatch.setattr(metrics.Score, "bits_per_byte", 0.0)
    logdir = tmp_path / "logdir"
    assert train(small_request(logdir, tmp_path, steps=20, save_every=20, eval_every=10)) == 0
    assert newest(str(logdir)) == str(logdir / "ckpt-20")
    found = scalars(logdir, "loss")
    assert len(found) == 20 and np.isfinite(found).all()
    assert np.mean(found[-5:]) < np.mean(found[:5]), "it learned something"
    perplexities = scalars(logdir, "word_perplexity")
    assert len(perplexities) == 20 and perplexities[0] == np.inf
    assert capfd.readouterr().out.count("held out at ") == 1


# More characters than a sample has.
MEGABYTES = 17

# All that touches text before and while a model is trained on it. Of the dataset without what is
# done to 64 lines at a time and takes longer than all else: lines are not cleaned, and one piece a
# line stands for SentencePiece. The vocabulary was learned before, of a sample that has the same
# limit for every text.
READ = """
import json, resource, sys
import tensorflow as tf
from models.one_billion_word import heldout, input as datasets
from models.one_billion_word.corpus import corpus_from_folder
from models.one_billion_word.unigram import fit_unigram
from models.one_billion_word.vocabulary import SAMPLE_CHARACTERS, SAMPLE_LIMIT, Vocabulary

folder, model, lines = sys.argv[1:]

with open(model, "rb") as file:
    vocabulary = Vocabulary(file.read())
peaks = {}

def note(what):
    peaks[what] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

note("begin")
corpus = corpus_from_folder(folder, "train-*", "heldout-*")
corpus.train.digest(), corpus.heldout.digest()
note("digests")
sample = sum(map(len, corpus.train.sample(SAMPLE_LIMIT, SAMPLE_CHARACTERS)))
note("sample")
sizes = {"batch_size": 32, "sequence_length": 128}
drawn = heldout.draw(corpus, vocabulary, batches=16, **sizes)
note("held-out sample")
fit_unigram(corpus.train, vocabulary, max_tokens=1_000_000)
note("counts")

def one_piece(lines):
    one = tf.ones_like(lines, tf.int32)
    return tf.RaggedTensor.from_row_lengths(9 * one, one)

datasets.sentences = lambda lines: lines
datasets.tokenizer = lambda _: one_piece
# All of an epoch, with its ends of lines, and some more.
steps = 2 * int(lines) // (32 * 128) + 2
iterator = iter(datasets.train_dataset(corpus, vocabulary, seed=1, **sizes))
for _ in range(steps):
    next(iterator)
note("dataset")
drawn = str(drawn).partition(" from all ")[2].partition(" ")[0]
json.dump({"peaks": peaks, "sample": sample, "drawn": drawn}, sys.stdout)
"""


def read(folder, vocabulary, tmp_path, lines):
    """Memory in megabytes at the beginning and at its peak, and what was read.

    Of the text to train on the dataset reads so many lines at least.
    """
    model = tmp_path / "model"
    model.write_bytes(vocabulary.model)
    ran = subprocess.run(
        # The memory that is counted is that of a new process.
        [sys.executable, "-c", READ, str(folder), str(model), str(lines)],
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "caches")},
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(ran.stdout)
    print(found)
    return found["peaks"].pop("begin"), max(found["peaks"].values()), found


def made(megabytes):
    """Documents of a few hundred bytes a line, of words of which few are frequent."""
    rng = np.random.default_rng(0)
    letters = rng.choice(list(b"etaoinshrdlucmfw"), (5000, 9)).astype(np.uint8)
    words = np.array([bytes(row[: 2 + i % 8]) for i, row in enumerate(letters)], object)
    lines = [b" ".join(words[rng.zipf(1.3, 110) % len(words)]) for _ in range(1000)]
    content = b"\n".join(lines) + b"\n"
    return content * ((megabytes << 20) // len(content) + 1)


def text_folder(folder, content, copies):
    """Text to train on and to judge by; each so many times the content, under so many names."""
    folder.mkdir()
    (folder / "train-0").write_bytes(content)
    (folder / "heldout-0").write_bytes(content)
    for number in range(1, copies):
        for part in ("train", "heldout"):
            os.link(folder / f"{part}-0", folder / f"{part}-{number}")
    return folder


@pytest.fixture(scope="module")
def small(vocabulary, tmp_path_factory):
    content = made(MEGABYTES)
    folder = text_folder(tmp_path_factory.mktemp("text") / "small", content, 1)
    return content, read(folder, vocabulary, folder, content.count(b"\n"))


def assert_no_more(small, begin, peak):
    _, (small_begin, small_peak, _) = small
    assert peak < 1.5 * small_peak, (peak, small_peak)
    # TensorFlow itself is most of it: without that, too.
    assert peak - begin < 1.5 * (small_peak - small_begin) + 100


@pytest.mark.slow
def test_ten_times_the_text_is_read_in_the_same_memory(small, vocabulary, tmp_path):
    content, (*_, found) = small
    copies = 10
    big = text_folder(tmp_path / "big", content, copies)
    # Unpacked it is five times the content, read by the way of a copy.
    (big / "train-packed").write_bytes(zstd.compress(content) * 5)
    lines = (copies + 5) * content.count(b"\n")
    begin, peak, of_big = read(big, vocabulary, tmp_path, lines)
    assert of_big["sample"] == found["sample"]
    sentences, many = (int(each["drawn"].replace(",", "")) for each in (found, of_big))
    assert many == copies * sentences > 0
    assert_no_more(small, begin, peak)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["one line", "empty lines"])
def test_text_of_a_shape_that_nobody_means(small, vocabulary, tmp_path, kind):
    content, _ = small
    odd = {
        "one line": content.replace(b"\n", b" ") * 10,
        "empty lines": content + b"\n" * (100 << 20) + b"the end\n",
    }
    folder = text_folder(tmp_path / "odd", odd[kind], 1)
    lines = max(content.count(b"\n"), len(odd[kind]) // LONGEST_LINE)
    begin, peak, _ = read(folder, vocabulary, tmp_path, lines)
    assert_no_more(small, begin, peak)
