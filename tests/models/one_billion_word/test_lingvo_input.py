"""lingvo reads the same batches, in a session and eagerly."""

import pathlib
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from backports import zstd
from lingvo.core import py_utils

from models.one_billion_word.corpus import CorpusError
from models.one_billion_word.input import heldout_dataset, train_dataset
from models.one_billion_word.lingvo_input import OneBillionWordInput, PackedRowsSource
from models.one_billion_word.text_copy import user_cache_dir
from models.one_billion_word.vocabulary import VocabularyError
from tests.warm import warm

SIZES = {"batch_size": 4, "sequence_length": 32}


@pytest.fixture
def eager_mode():
    was = py_utils.IsEagerMode()
    # Only lingvo's flag: TensorFlow itself runs eagerly here already.
    py_utils.SetEagerMode(True, test_mode=True)
    yield
    py_utils.SetEagerMode(was, test_mode=True)


@pytest.fixture
def session():
    was = py_utils.IsEagerMode()
    py_utils.SetEagerMode(False, test_mode=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        yield session
    py_utils.SetEagerMode(was, test_mode=True)


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


def assert_equal(batch, expected):
    assert isinstance(batch, py_utils.NestedMap)
    assert set(batch) == {"ids", "labels", "segment_ids", "segment_pos", "weights"}
    for key, value in expected.items():
        np.testing.assert_array_equal(batch[key], value, err_msg=key)


def test_training_in_a_session(session, params, expected):
    generator = params().Instantiate()
    batch = generator.GetPreprocessedInputBatch()
    assert all(tensor.shape.as_list() == [4, 32] for tensor in batch.Flatten())
    generator.Initialize(session)
    for want in expected[0]:
        assert_equal(session.run(batch), want)


def test_evaluation_in_a_session_ends_and_starts_again(session, params, expected):
    generator = params(heldout=True).Instantiate()
    batch = generator.GetPreprocessedInputBatch()
    generator.Initialize(session)
    for _ in range(2):
        for want in expected[1]:
            assert_equal(session.run(batch), want)
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(batch)
        generator.Reset(session)


def test_training_and_evaluation_share_a_graph(session, params, expected):
    train = params(name="train").Instantiate()
    heldout = params(name="heldout", heldout=True).Instantiate()
    fetches = [train.GetPreprocessedInputBatch(), heldout.GetPreprocessedInputBatch()]
    for generator in (train, heldout):
        generator.Initialize(session)
    for got, want in zip(session.run(fetches), (expected[0][0], expected[1][0]), strict=True):
        assert_equal(got, want)


@pytest.mark.usefixtures("eager_mode")
def test_training_eagerly(params, expected):
    generator = params().Instantiate()
    for want in expected[0][:2]:
        assert_equal(generator.GetPreprocessedInputBatch(), want)
    next_batch = tf.function(generator.GetPreprocessedInputBatch)
    assert_equal(next_batch(), expected[0][2])


@pytest.mark.usefixtures("eager_mode")
def test_evaluation_eagerly_ends_and_starts_again(params, expected):
    generator = params(heldout=True).Instantiate()
    for _ in range(2):
        for want in expected[1]:
            assert_equal(generator.GetPreprocessedInputBatch(), want)
        with pytest.raises(tf.errors.OutOfRangeError):
            generator.GetPreprocessedInputBatch()
        generator.Reset()


@pytest.mark.usefixtures("eager_mode")
def test_a_folder_with_patterns(params, folder):
    p = params(data_dir=folder, train_pattern="train-*", heldout_pattern="heldout-*", heldout=True)
    batch = p.Instantiate().GetPreprocessedInputBatch()
    assert batch.weights.numpy().all()


def test_hosts_read_together_what_one_reads(params, session, expected, monkeypatch):
    """Two hosts with two rows each see the rows of one with four."""
    for host in (0, 1):
        monkeypatch.setattr(PackedRowsSource, "num_hosts", 2)
        monkeypatch.setattr(PackedRowsSource, "host_id", host)
        generator = params(batch_size=2, name=f"host{host}").Instantiate()
        batch = generator.GetPreprocessedInputBatch()
        generator.Initialize(session)
        for want in expected[0]:
            assert_equal(session.run(batch), {k: v[2 * host :][:2] for k, v in want.items()})


@pytest.mark.parametrize("pack", [bytes, zstd.compress])
def test_files_in_a_session(session, params, folder, vocabulary, tmp_path, pack):
    for path in pathlib.Path(folder).iterdir():
        (tmp_path / path.name).write_bytes(pack(path.read_bytes()))
    patterns = {"train_pattern": "train-*", "heldout_pattern": "heldout-*"}
    generator = params(data_dir=str(tmp_path), vocab_size=400, **patterns).Instantiate()
    batch = generator.GetPreprocessedInputBatch()
    generator.Initialize(session)
    for _ in range(99):
        assert session.run(batch).weights.all()


@pytest.mark.usefixtures("eager_mode")
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"data_dir": "/no/such/folder"}, CorpusError, "--data_dir='/no/such/folder'"),
        ({"train_pattern": "*.txt"}, CorpusError, "--train_pattern"),
        ({"vocab_size": 10**6}, VocabularyError, "--vocab_size=1000000 is too large"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
    ],
)
def test_bad_params(params, change, error, match):
    with pytest.raises(error, match=match):
        params(**change).Instantiate().GetPreprocessedInputBatch()


def test_the_users_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert user_cache_dir() == "/caches/pipemesh"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert user_cache_dir() == "/home/someone/.cache/pipemesh"


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
    assert_equal(py_utils.NestedMap(np.load(result)), expected[0][0])
