"""Restoring, and checkpoints that are refused."""

import itertools
import os

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.saved_state import Slice, SlicedVariable
from pipemesh.checkpoint import Checkpoints, contents, reader, restore
from pipemesh.errors import CheckpointError, DamagedError
from tests.checkpoint.made import flipped

WHOLE = np.arange(24.0, dtype=np.float32).reshape(4, 6)
# Where rows and columns are cut.
CUTS = [((0, 4), (0, 6)), ((0, 2, 4), (0, 6)), ((0, 4), (0, 3, 6)), ((0, 2, 4), (0, 2, 4, 6))]


def cut(rows, columns, value=None, dtype=tf.float32):
    whole = np.zeros_like(WHOLE) if value is None else value
    parts = []
    for (a, b), (c, d) in itertools.product(itertools.pairwise(rows), itertools.pairwise(columns)):
        parts.append((tf.Variable(tf.cast(whole[a:b, c:d], dtype)), Slice((4, 6), (a, c))))
    return SlicedVariable(parts)


def whole_of(sliced):
    found = np.zeros_like(WHOLE)
    for variable, part in sliced.parts:
        (a, c), (h, w) = part.begin, variable.shape
        found[a : a + h, c : c + w] = tf.cast(variable, tf.float32).numpy()
    return found


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("there", range(len(CUTS)))
def test_every_cut_is_restored_from_every_other(tmp_path, there, dtype):
    path = Checkpoints(str(tmp_path), {"w": cut(*CUTS[there], WHOLE, dtype)}).save(1, {})
    whole = tf.constant(tf.train.load_checkpoint(path).get_tensor("w"))
    np.testing.assert_array_equal(tf.cast(whole, tf.float32), WHOLE)
    for here, to in itertools.product(CUTS, (tf.float32, tf.bfloat16)):
        w = cut(*here, dtype=to)
        assert restore(path, {"w": w}) == []
        np.testing.assert_array_equal(whole_of(w), WHOLE)


def test_an_iterator_goes_on_where_it_was(tmp_path):
    dataset = tf.data.Dataset.range(1000).shuffle(64, seed=3).map(lambda x: 2 * x).batch(5)
    iterator = iter(dataset)
    for _ in range(7):
        next(iterator)
    path = Checkpoints(str(tmp_path), {"data": iterator}).save(1, {})
    expected = [next(iterator).numpy().tolist() for _ in range(9)]
    other = iter(dataset)
    restore(path, {"data": other})
    assert [next(other).numpy().tolist() for _ in range(9)] == expected
    with pytest.raises(CheckpointError, match="'data' is a position in another dataset"):
        restore(path, {"data": iter(tf.data.Dataset.range(3).repeat())})


def test_other_names_are_returned_missing_ones_are_errors(tmp_path):
    tracked = {"a/w/var": tf.Variable([1.0, 2.0]), "a/n": tf.Variable(3)}
    path = Checkpoints(str(tmp_path), tracked).save(1, {})
    w = tf.Variable([0.0, 0.0])
    assert restore(path, {"a/w/var": w}) == ["a/n"]
    assert w.numpy().tolist() == [1.0, 2.0]
    w.assign([0.0, 0.0])
    for wrong, told in (
        ({"a/v/var": w}, "has no 'a/v/var'; the nearest name that it has is 'a/w/var'"),
        ({"a/w/var": tf.Variable([0.0])}, r"'a/w/var' has shape \[2\] in the .*, but .* \[1\];"),
        ({"a/n": tf.Variable(0.0)}, "'a/n' is int32 in the .*, but the model needs float32;"),
    ):
        with pytest.raises(CheckpointError, match=told):
            restore(path, {"a/w/var": w} | wrong)
        assert not w.numpy().any(), "nothing is assigned"


def test_no_host_reads_all_at_once(tmp_path, monkeypatch):
    tracked = {str(n): tf.Variable(tf.fill([100], float(n))) for n in range(10)}
    path = Checkpoints(str(tmp_path), tracked).save(1, {})
    held = []
    real = tf.raw_ops.RestoreV2

    def counted(**arguments):
        held.append(len(arguments["tensor_names"]))
        return real(**arguments)

    monkeypatch.setattr(reader, "_BYTES_AT_ONCE", 1200)
    monkeypatch.setattr(tf.raw_ops, "RestoreV2", counted)
    for variable in tracked.values():
        variable.assign(tf.zeros([100]))
    restore(path, tracked)
    assert held == [3, 3, 3, 1]
    assert [v.numpy()[7] for v in tracked.values()] == list(range(10))


def test_no_flipped_bit_of_a_tensor_passes(tmp_path):
    w = tf.Variable(tf.random.stateless_normal([40, 50], [1, 2]))
    path = Checkpoints(str(tmp_path), {"w": w}).save(1, {})
    data = tmp_path / "ckpt-1.data-00000-of-00001"
    for bad in flipped(data.read_bytes(), 60):
        data.write_bytes(bad)
        with pytest.raises(DamagedError, match=r"ckpt-1\.data-00000-\* cannot be read"):
            restore(path, {"w": w})
    # The manifest has the digest of the index: TensorFlow does not look at each of its bits.
    os.truncate(f"{path}.index", 20)
    with pytest.raises(DamagedError, match=r"ckpt-1\.\* cannot be read"):
        contents(path)


def test_a_checkpoint_of_lingvos_saver_is_one(tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("lm/w/var", initializer=[1.0, 2.0, 3.0])
        session.run(variable.initializer)
        path = tf.compat.v1.train.Saver().save(session, str(tmp_path / "ckpt"), global_step=12)
    halves = [tf.Variable([0.0, 0.0]), tf.Variable([0.0])]
    sliced = SlicedVariable([(halves[0], Slice((3,), (0,))), (halves[1], Slice((3,), (2,)))])
    assert restore(path, {"lm/w/var": sliced}) == []
    assert halves[0].numpy().tolist() + halves[1].numpy().tolist() == [1.0, 2.0, 3.0]


def test_the_reason_is_the_message_of_the_function():
    def read(number):
        raise CheckpointError(f"'train-1' says something else: {int(number)}")

    dataset = tf.data.Dataset.range(3).map(lambda x: tf.py_function(read, [x], tf.int64))
    with pytest.raises(tf.errors.OpError) as caught:
        next(iter(dataset))
    assert reader.reason(caught.value) == "'train-1' says something else: 0"


def test_a_temporary_error_is_not_damage(tmp_path, monkeypatch):
    """Short of memory or of file handles, one good checkpoint after the other was set aside."""
    w = tf.Variable([1.0])
    path = Checkpoints(str(tmp_path), {"w": w}).save(1, {})

    def short(**_):
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    monkeypatch.setattr(tf.raw_ops, "RestoreV2", short)
    with pytest.raises(CheckpointError, match=r"ckpt-1 cannot be read \(out of memory\)") as caught:
        restore(path, {"w": w})
    assert not isinstance(caught.value, DamagedError)
