"""Batches of text: packing, order, position, and lingvo's input generator."""

import collections
import gzip
import itertools
import pathlib
import shutil
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from backports import zstd
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lingvo.core import py_utils

from models.one_billion_word import heldout
from models.one_billion_word import input as datasets
from models.one_billion_word.corpus import (
    Corpus,
    Sentences,
    clean,
    corpus_from_folder,
)
from models.one_billion_word.input import InputError, heldout_dataset, train_dataset
from models.one_billion_word.lingvo_input import OneBillionWordInput, PackedRowsSource
from models.one_billion_word.text_copy import user_cache_dir
from models.one_billion_word.vocabulary import load_vocabulary
from pipemesh.data import packing
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


def read_sentences(batches, vocabulary):
    """The whole sentences of batches in order, put together again from labels."""
    pieces = []
    for batch in batches:
        labels, weights = np.asarray(batch["labels"]), np.asarray(batch["weights"])
        for piece in labels[weights > 0]:
            if piece == vocabulary.eos_id:
                yield vocabulary.decode(pieces)
                pieces = []
            else:
                pieces.append(piece)


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

    one = first(-(2**40))
    tf.random.set_seed(5)
    assert_equal(one, first(-(2**40)))
    assert not np.array_equal(one[0]["ids"], first(8)[0]["ids"])


def test_an_epoch_reads_every_sentence_once_and_the_next_in_another_order(any_corpus, vocabulary):
    dataset = train_dataset(any_corpus, vocabulary, batch_size=4, sequence_length=32, seed=3)
    number = len(list(any_corpus.train))
    both = list(itertools.islice(read_sentences(dataset, vocabulary), 2 * number))
    one, two = both[:number], both[number:]
    assert sorted(one) == sorted(two) == sorted(any_corpus.train)
    assert one != two
    assert one != list(any_corpus.train)


def test_shards_read_together_what_one_reader_reads(any_corpus, vocabulary):
    """The order of the data knows nothing of how many processes read it."""
    num_shards = 3

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


def test_reading_goes_on_where_it_stopped(any_corpus, vocabulary, tmp_path):
    position = 40

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
    # A line that is cut, where reading may stop as well.
    (here / "train-long.txt").write_bytes(b"word after word " * 20_000)
    iterator = build(here, 7)
    assert not np.array_equal(next(iterator)["ids"], next(build(here, 0))["ids"])
    for _ in range(300):
        next(iterator)
    path = tf.train.Checkpoint(batches=iterator).write(str(tmp_path / "checkpoint"))
    rest = [next(iterator)["ids"].numpy() for _ in range(500)]
    there = tmp_path / "there"
    there.mkdir()
    packs = itertools.cycle([gzip.compress, zstd.compress])
    for file, pack in zip(here.iterdir(), packs, strict=False):
        (there / file.name).write_bytes(pack(file.read_bytes()))
    shutil.rmtree(here)
    resumed = build(there, 0)
    tf.train.Checkpoint(batches=resumed).read(path).assert_consumed()
    for expected in rest:
        np.testing.assert_array_equal(next(resumed)["ids"], expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"batch_size": 0}, r"batch_size is 0; at least 1"),
        ({"sequence_length": -1}, r"sequence_length is -1; at least 1"),
        ({"num_shards": 2, "shard": 2}, r"shard 2 of 2 shards; shards count from 0"),
        ({"shard": -1}, r"shard -1 of 1 shards"),
        ({"num_shards": 0}, r"shard 0 of 0 shards"),
        ({"corpus": Corpus("blank", Sentences((" ", "")), Sentences(("c",)))}, "blank has no text"),
    ],
)
def test_what_cannot_be_read(vocabulary, change, match):
    tiny = Corpus("tiny", train=Sentences(("a", "b", " ")), heldout=Sentences(("c",)))
    arguments = {"corpus": tiny, "batch_size": 1, "sequence_length": 4, "seed": 0} | change
    with pytest.raises(InputError, match=match):
        train_dataset(vocabulary=vocabulary, **arguments)
    if change.keys() <= {"batch_size", "sequence_length"}:
        with pytest.raises(InputError, match=match):
            heldout_dataset(tiny, vocabulary, **({"batch_size": 1, "sequence_length": 4} | change))


def test_the_tokenizer_is_quiet(corpus, vocabulary, capfd):
    dataset = heldout_dataset(corpus, vocabulary, batch_size=1, sequence_length=8)
    batches(dataset, 1)
    assert "normalizer" not in capfd.readouterr().err


BOS, EOS = 1, 2
KEYS = {"ids", "labels", "segment_ids", "segment_pos", "weights"}


def tokenize(lines):
    return tf.strings.to_number(tf.strings.split(lines), tf.int32)


def pack(sentences, batch_size, length, group=3):
    lines = [" ".join(map(str, pieces)) for pieces in sentences]
    dataset = tf.data.Dataset.from_tensor_slices(tf.constant(lines, tf.string)).batch(group)
    stream = packing.token_stream(dataset, tokenize, BOS, EOS)
    batches = packing.pack(stream, batch_size=batch_size, sequence_length=length, bos_id=BOS)
    return list(batches.as_numpy_iterator())


def rows(batches):
    return {key: np.concatenate([batch[key] for batch in batches]) for key in KEYS}


PIECES = st.lists(st.integers(3, 99), max_size=9)


@settings(deadline=None, max_examples=12)
@given(
    sentences=st.lists(PIECES, min_size=1, max_size=12),
    batch_size=st.integers(1, 3),
    length=st.integers(1, 8),
    group=st.integers(1, 5),
)
@pytest.mark.slow
def test_every_position_is_there_once_and_knows_its_segment(sentences, batch_size, length, group):
    batches = pack(sentences, batch_size, length, group)
    assert all(batch[key].shape == (batch_size, length) for batch in batches for key in KEYS)
    row = rows(batches)
    real = row["weights"].ravel() == 1
    stream_ids = [piece for pieces in sentences for piece in [BOS, *pieces]]
    stream_labels = [piece for pieces in sentences for piece in [*pieces, EOS]]
    assert row["ids"].ravel()[real].tolist() == stream_ids
    assert row["labels"].ravel()[real].tolist() == stream_labels
    assert real[: len(stream_ids)].all(), "only the end is padded"
    assert real.size - len(stream_ids) < batch_size * length, "no batch is all padding"
    for key in KEYS:
        assert not row[key].ravel()[~real].any(), f"padding is 0 in {key}"
    # Walk through every row the slow way.
    for ids, segment_ids, segment_pos, weights in zip(
        *(row[key] for key in ("ids", "segment_ids", "segment_pos", "weights")), strict=True
    ):
        segment = position = 0
        for column in range(int(weights.sum())):
            if column == 0 or ids[column] == BOS:
                segment, position = segment + 1, 0
            assert (segment_ids[column], segment_pos[column]) == (segment, position)
            position += 1


def test_groups_without_a_line_are_passed_over():
    assert pack([], 1, 4) == []

    def keep(lines):
        return tf.boolean_mask(lines, tf.not_equal(lines, "drop"))

    lines = tf.data.Dataset.from_tensor_slices(["3", "4", "drop", "drop", "5"]).batch(2).map(keep)
    stream = packing.token_stream(lines, tokenize, BOS, EOS)
    (batch,) = packing.pack(stream, batch_size=1, sequence_length=6, bos_id=BOS)
    assert batch["labels"].numpy().tolist() == [[3, EOS, 4, EOS, 5, EOS]]


SIZES = {"batch_size": 4, "sequence_length": 32}


@pytest.fixture
def session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        yield session


@pytest.fixture
def params(cache_dir):
    def params(**more):
        p = OneBillionWordInput.Params()
        return p.Set(cache_dir=cache_dir, vocab_size=600, seed=4, **SIZES).Set(**more)

    return params


@pytest.fixture(scope="module")
def expected(corpus, vocabulary):
    train = train_dataset(corpus, vocabulary, seed=4, **SIZES)
    heldout = heldout_dataset(corpus, vocabulary, **SIZES)
    return list(train.take(3).as_numpy_iterator()), list(heldout.as_numpy_iterator())


def assert_same_batch(batch, expected):
    assert isinstance(batch, py_utils.NestedMap)
    assert set(batch) == {"ids", "labels", "segment_ids", "segment_pos", "weights"}
    for key, value in expected.items():
        np.testing.assert_array_equal(batch[key], value, err_msg=key)


def test_training_and_evaluation_in_a_session(session, params, expected):
    train = params(name="train").Instantiate()
    heldout = params(name="heldout", heldout=True).Instantiate()
    batch, judged = (made.GetPreprocessedInputBatch() for made in (train, heldout))
    assert all(tensor.shape.as_list() == [4, 32] for tensor in batch.Flatten())
    for generator in (train, heldout):
        generator.Initialize(session)
    for _ in range(2):
        for want in expected[1]:
            assert_same_batch(session.run(judged), want)
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(judged)
        heldout.Reset(session)
    for want in expected[0]:
        assert_same_batch(session.run(batch), want)


def test_training_and_evaluation_eagerly(eagerly, params, expected):
    generator = params().Instantiate()
    for want in expected[0][:2]:
        assert_same_batch(generator.GetPreprocessedInputBatch(), want)
    next_batch = tf.function(generator.GetPreprocessedInputBatch)
    assert_same_batch(next_batch(), expected[0][2])
    generator = params(heldout=True).Instantiate()
    for _ in range(2):
        for want in expected[1]:
            assert_same_batch(generator.GetPreprocessedInputBatch(), want)
        with pytest.raises(tf.errors.OutOfRangeError):
            generator.GetPreprocessedInputBatch()
        generator.Reset()


TRAINER = """
import sys
import numpy as np
import tensorflow as tf
from models.one_billion_word.lingvo_input import OneBillionWordInput

tf.compat.v1.disable_v2_behavior()
cache_dir, result = sys.argv[1:]
p = OneBillionWordInput.Params()
p.Set(cache_dir=cache_dir, vocab_size=600, seed=4, batch_size=4, sequence_length=32)
with tf.compat.v1.Session() as session:
    generator = p.Instantiate()
    batch = generator.GetPreprocessedInputBatch()
    generator.Initialize(session)
    np.savez(result, **session.run(batch))
"""


@pytest.mark.slow
def test_it_reads_with_the_switches_that_the_trainer_sets(cache_dir, expected, tmp_path):
    # `lingvo.trainer` turns TensorFlow 2 off for the whole process.
    result = str(tmp_path / "result.npz")
    subprocess.run(warm("-c", TRAINER, cache_dir, result), check=True)
    assert_same_batch(py_utils.NestedMap(np.load(result)), expected[0][0])


def test_hosts_read_together_what_one_reads(params, session, expected, monkeypatch):
    """Two hosts with two rows each see the rows of one with four."""
    for host in (0, 1):
        monkeypatch.setattr(PackedRowsSource, "num_hosts", 2)
        monkeypatch.setattr(PackedRowsSource, "host_id", host)
        generator = params(batch_size=2, name=f"host{host}").Instantiate()
        batch = generator.GetPreprocessedInputBatch()
        generator.Initialize(session)
        for want in expected[0]:
            assert_same_batch(session.run(batch), {k: v[2 * host :][:2] for k, v in want.items()})


def test_files_in_a_session(session, params, folder, tmp_path):
    for path in pathlib.Path(folder).iterdir():
        (tmp_path / path.name).write_bytes(zstd.compress(path.read_bytes()))
    patterns = {"train_pattern": "train-*", "heldout_pattern": "heldout-*"}
    generator = params(data_dir=str(tmp_path), vocab_size=400, **patterns).Instantiate()
    batch = generator.GetPreprocessedInputBatch()
    generator.Initialize(session)
    for _ in range(99):
        assert session.run(batch).weights.all()


def test_the_users_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert user_cache_dir() == "/caches/pipemesh"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert user_cache_dir() == "/home/someone/.cache/pipemesh"


def draw(corpus, vocabulary, batches):
    return heldout.draw(corpus, vocabulary, batch_size=2, sequence_length=32, batches=batches)


def test_the_sample_comes_from_all_of_the_text_and_is_always_the_same(vocabulary):
    # Four kinds of text one after the other: the head of it is of the first kind only.
    lines = [
        f"{kind} {number}" for kind in ("red", "green", "blue", "grey") for number in range(99)
    ]
    corpus = Corpus("kinds", Sentences(("x",)), Sentences(tuple(lines)))
    sample = draw(corpus, vocabulary, 6)
    assert len(sample.batches) == 6
    assert all(batch["weights"].numpy().all() for batch in sample.batches), "no padding"
    found = list(read_sentences(sample.batches, vocabulary))
    assert set(found) <= set(lines) and len(set(found)) == len(found) > 30
    kinds = collections.Counter(line.split()[0] for line in found)
    assert len(kinds) == 4 and min(kinds.values()) > len(found) / 10
    again = draw(corpus, vocabulary, 6)
    for one, two in zip(sample.batches, again.batches, strict=True):
        np.testing.assert_array_equal(one["ids"], two["ids"])
    assert str(sample) == "6 batches of sentences drawn evenly from all 396 held-out ones"


def test_a_text_that_fits_is_taken_whole_and_in_order(corpus, vocabulary):
    few = Corpus("few", corpus.train, Sentences(corpus.heldout.lines[:9]))
    sample = draw(few, vocabulary, 99)
    assert list(read_sentences(sample.batches, vocabulary)) == list(few.heldout)
    whole = list(heldout_dataset(few, vocabulary, batch_size=2, sequence_length=32))
    assert str(sample) == f"all of the held-out text, {len(whole)} batches"


def test_one_sentence_that_is_longer_than_the_sample(vocabulary):
    corpus = Corpus("one", Sentences(("x",)), Sentences(("a b c " * 999,)))
    assert len(draw(corpus, vocabulary, 2).batches) == 2
