"""Every sentence is read, in an order that follows from the seed, from where reading stopped."""

import gzip
import itertools
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.one_billion_word import input as datasets
from models.one_billion_word.corpus import (
    Corpus,
    Sentences,
    clean,
    corpus_from_folder,
)
from models.one_billion_word.input import InputError, heldout_dataset, train_dataset
from models.one_billion_word.vocabulary import load_vocabulary
from tests.warm import warm


@pytest.fixture(scope="module", params=["memory", "files"])
def any_corpus(request, corpus, folder):
    if request.param == "memory":
        return Corpus(
            "memory",
            train=Sentences(corpus.train.lines[:400]),
            heldout=Sentences(corpus.heldout.lines[:60]),
        )
    return corpus_from_folder(folder, "train-*.txt", "heldout-*.txt")


def batches(dataset, number):
    return [
        {key: value.copy() for key, value in batch.items()}
        for batch in itertools.islice(dataset.as_numpy_iterator(), number)
    ]


def assert_equal(ones, twos):
    assert len(ones) == len(twos)
    for one, two in zip(ones, twos, strict=True):
        for key in one:
            np.testing.assert_array_equal(one[key], two[key], err_msg=key)


def read_sentences(dataset, vocabulary):
    """The sentences of a dataset in order, put together again from labels."""
    pieces = []
    for batch in dataset.as_numpy_iterator():
        for piece in batch["labels"][batch["weights"] > 0]:
            if piece == vocabulary.eos_id:
                yield vocabulary.decode(pieces)
                pieces = []
            else:
                pieces.append(piece)
    assert not pieces


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary() | st.text().map(lambda text: text.encode("utf-8", "replace"))))
@example(
    [b"\xef\xbb\xbf a", b"\r\xef\xbb\xbf\r\xef\xbb\xbfa", b" \xef\xbb\xbfa", b"\r \xef\xbb\xbf"]
)
@example([b"\xe2\x96\x81a \r", b"\xff\xfe \x00", b" \t\n\v\f\r", b"\xe2\x96", b"a\rb", b"\xc2\xa0"])
def test_lines_are_cleaned_as_the_corpus_cleans_them(lines):
    expected = [clean(line.decode("utf-8", "replace")) for line in lines]
    got = datasets.sentences(tf.constant(lines, tf.string)).numpy()
    assert [line.decode() for line in got] == [line for line in expected if line]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"])), max_size=4))
def test_pieces_are_those_of_the_vocabulary(vocabulary, texts):
    tokenize = datasets.tokenizer(vocabulary)
    got = tokenize(tf.constant([text.encode() for text in texts], tf.string))
    assert got.dtype == tf.int32
    assert got.to_list() == vocabulary.encode_all(texts)


def test_two_vocabularies_do_not_mix(corpus, vocabulary, cache_dir):
    other = load_vocabulary(corpus, 500, cache_dir)
    one, two = datasets.tokenizer(vocabulary), datasets.tokenizer(other)
    lines = list(corpus.heldout.lines)
    assert one(lines).to_list() == vocabulary.encode_all(lines)
    assert two(lines).to_list() == other.encode_all(lines)


def test_training_batches_are_full_and_static(any_corpus, vocabulary):
    dataset = train_dataset(any_corpus, vocabulary, batch_size=3, sequence_length=16, seed=1)
    assert {
        key: (spec.shape.as_list(), spec.dtype) for key, spec in dataset.element_spec.items()
    } == {
        "ids": ([3, 16], tf.int32),
        "labels": ([3, 16], tf.int32),
        "segment_ids": ([3, 16], tf.int32),
        "segment_pos": ([3, 16], tf.int32),
        "weights": ([3, 16], tf.float32),
    }
    for batch in batches(dataset, 5):
        assert batch["weights"].all() and batch["segment_ids"].all()


def test_the_seed_alone_decides_the_order(any_corpus, vocabulary):
    def first(seed):
        dataset = train_dataset(any_corpus, vocabulary, batch_size=2, sequence_length=64, seed=seed)
        return batches(dataset, 4)

    one = first(7)
    tf.random.set_seed(5)
    assert_equal(one, first(7))
    assert not np.array_equal(one[0]["ids"], first(8)[0]["ids"])
    assert_equal(first(-(2**40)), first(-(2**40)))


def test_an_epoch_reads_every_sentence_once_and_the_next_in_another_order(any_corpus, vocabulary):
    dataset = train_dataset(any_corpus, vocabulary, batch_size=4, sequence_length=32, seed=3)
    number = len(list(any_corpus.train))
    both = list(itertools.islice(read_sentences(dataset, vocabulary), 2 * number))
    one, two = both[:number], both[number:]
    assert sorted(one) == sorted(two) == sorted(any_corpus.train)
    assert one != two
    assert one != list(any_corpus.train)


@pytest.mark.parametrize("num_shards", [3])
def test_shards_read_together_what_one_reader_reads(any_corpus, vocabulary, num_shards):
    """The order of the data knows nothing of how many processes read it."""

    def read(rows, **sharding):
        dataset = train_dataset(
            any_corpus, vocabulary, batch_size=rows, sequence_length=32, seed=3, **sharding
        )
        return batches(dataset, 5)

    whole = read(2 * num_shards)
    parts = [read(2, num_shards=num_shards, shard=shard) for shard in range(num_shards)]
    together = [
        {key: np.concatenate([part[key] for part in rows]) for key in rows[0]}
        for rows in zip(*parts, strict=True)
    ]
    assert_equal(together, whole)


def test_held_out_text_is_read_once_in_order_to_its_last_byte(any_corpus, vocabulary):
    dataset = heldout_dataset(any_corpus, vocabulary, batch_size=4, sequence_length=50)
    assert list(read_sentences(dataset, vocabulary)) == list(any_corpus.heldout)
    got = batches(dataset, None)
    assert all(batch["ids"].shape == (4, 50) for batch in got)
    labels = np.concatenate([batch["labels"][batch["weights"] > 0] for batch in got])
    assert vocabulary.piece_bytes[labels].sum() == sum(
        len(sentence.encode()) + 1 for sentence in any_corpus.heldout
    )
    assert_equal(got, batches(dataset, None))


@pytest.mark.parametrize("position", [0, 1, 40])
def test_reading_goes_on_where_it_stopped(any_corpus, vocabulary, tmp_path, position):
    def build():
        return train_dataset(any_corpus, vocabulary, batch_size=8, sequence_length=128, seed=5)

    uninterrupted = batches(build(), position + 30)
    iterator = iter(build())
    for _ in range(position):
        next(iterator)
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "checkpoint"))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1_000_000

    resumed = iter(build())
    next(resumed)
    tf.train.Checkpoint(iterator=resumed).read(path).assert_consumed()
    rest = [{key: value.numpy() for key, value in next(resumed).items()} for _ in range(30)]
    assert_equal(rest, uninterrupted[position:])


def test_a_place_in_the_text_holds_for_a_copy_elsewhere_and_any_first_epoch(
    folder, vocabulary, tmp_path
):
    def build(place, first_epoch):
        corpus = corpus_from_folder(str(place), "train-*.txt", "heldout-*.txt")
        return iter(
            train_dataset(
                corpus,
                vocabulary,
                batch_size=4,
                sequence_length=64,
                seed=9,
                first_epoch=first_epoch,
            )
        )

    here = tmp_path / "here"
    shutil.copytree(folder, here)
    iterator = build(here, 7)
    assert not np.array_equal(next(iterator)["ids"], next(build(here, 0))["ids"])
    for _ in range(120):
        next(iterator)
    path = tf.train.Checkpoint(batches=iterator).write(str(tmp_path / "checkpoint"))
    rest = [next(iterator)["ids"].numpy() for _ in range(60)]
    there = tmp_path / "there"
    there.mkdir()
    for file in here.iterdir():
        (there / file.name).write_bytes(gzip.compress(file.read_bytes()))
    shutil.rmtree(here)
    resumed = build(there, 0)
    tf.train.Checkpoint(batches=resumed).read(path).assert_consumed()
    for expected in rest:
        np.testing.assert_array_equal(next(resumed)["ids"], expected)


RESUME = """
import sys
import numpy as np
import tensorflow as tf
from models.one_billion_word.corpus import corpus_from_folder
from models.one_billion_word.input import train_dataset
from models.one_billion_word.vocabulary import load_vocabulary

folder, cache_dir, checkpoint, result = sys.argv[1:]
corpus = corpus_from_folder(folder, "train-*.txt", "heldout-*.txt")
vocabulary = load_vocabulary(corpus, 500, cache_dir)
iterator = iter(train_dataset(corpus, vocabulary, batch_size=4, sequence_length=64, seed=9))
tf.train.Checkpoint(iterator=iterator).read(checkpoint).assert_consumed()
np.save(result, np.stack([next(iterator)["ids"].numpy() for _ in range(100)]))
"""


@pytest.mark.slow
def test_another_process_goes_on_with_the_next_batch(folder, cache_dir, tmp_path):
    corpus = corpus_from_folder(folder, "train-*.txt", "heldout-*.txt")
    vocabulary = load_vocabulary(corpus, 500, cache_dir)
    iterator = iter(train_dataset(corpus, vocabulary, batch_size=4, sequence_length=64, seed=9))
    for _ in range(33):
        next(iterator)
    checkpoint = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "checkpoint"))
    uninterrupted = np.stack([next(iterator)["ids"].numpy() for _ in range(100)])
    result = str(tmp_path / "result.npy")
    subprocess.run(warm("-c", RESUME, folder, cache_dir, checkpoint, result), check=True)
    np.testing.assert_array_equal(np.load(result), uninterrupted)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"batch_size": 0}, r"batch_size is 0; at least 1"),
        ({"sequence_length": -1}, r"sequence_length is -1; at least 1"),
        ({"num_shards": 2, "shard": 2}, r"shard 2 of 2 shards; shards count from 0"),
        ({"shard": -1}, r"shard -1 of 1 shards"),
        ({"num_shards": 0}, r"shard 0 of 0 shards"),
    ],
)
def test_what_cannot_be_read(vocabulary, change, match):
    tiny = Corpus("tiny", train=Sentences(("a", "b", " ")), heldout=Sentences(("c",)))
    arguments = {"batch_size": 1, "sequence_length": 4, "seed": 0} | change
    with pytest.raises(InputError, match=match):
        train_dataset(tiny, vocabulary, **arguments)


def test_text_without_a_sentence(vocabulary):
    blank = Corpus("blank", train=Sentences((" ", "")), heldout=Sentences(("c",)))
    with pytest.raises(InputError, match="blank has no text to train on"):
        train_dataset(blank, vocabulary, batch_size=1, sequence_length=4, seed=0)


@pytest.mark.parametrize("change", [{"batch_size": 0}, {"sequence_length": 0}])
def test_what_cannot_be_read_to_judge_by(corpus, vocabulary, change):
    with pytest.raises(InputError, match="is 0; at least 1"):
        heldout_dataset(corpus, vocabulary, **({"batch_size": 1, "sequence_length": 4} | change))


def test_the_tokenizer_is_quiet(corpus, vocabulary, capfd):
    dataset = heldout_dataset(corpus, vocabulary, batch_size=1, sequence_length=8)
    batches(dataset, 1)
    assert "normalizer" not in capfd.readouterr().err
