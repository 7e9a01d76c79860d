"""Text of any size and shape is read in the same memory: none is held as a whole."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from backports import zstd

from models.one_billion_word.text_file import LONGEST_LINE

MEGABYTES = 20

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
json.dump({"peaks": peaks, "sample": sample, "drawn": drawn.sentences}, sys.stdout)
"""


def read(folder, vocabulary, tmp_path, lines):
    """Memory in megabytes at the beginning and at its peak, and what was read.

    Of the text to train on the dataset reads so many lines at least.
    """
    model = tmp_path / "model"
    model.write_bytes(vocabulary.model)
    ran = subprocess.run(
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
    lines = []
    size = 0
    while size < megabytes << 20:
        line = b" ".join(words[rng.zipf(1.3, rng.integers(20, 200)) % len(words)])
        lines.append(line)
        size += len(line) + 1
    return b"\n".join(lines) + b"\n"


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
@pytest.mark.parametrize("copies", [10, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_two_gigabytes_are_read_in_the_memory_of_twenty_megabytes(
    small, vocabulary, tmp_path, copies
):
    content, (*_, found) = small
    big = text_folder(tmp_path / "big", content, copies)
    # Unpacked it is five times the content, read by the way of a copy.
    (big / "train-packed").write_bytes(zstd.compress(content) * 5)
    lines = (copies + 5) * content.count(b"\n")
    begin, peak, of_big = read(big, vocabulary, tmp_path, lines)
    assert of_big["sample"] == found["sample"]
    assert of_big["drawn"] == copies * found["drawn"] > 0
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
