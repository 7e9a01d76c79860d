"""Arrays that say which example each element of a tensor belongs to."""

import numpy as np
import pytest

from pipemesh.randomness import example_labels as labels
from pipemesh.randomness.example_labels import (
    NO_EXAMPLE,
    NO_EXAMPLES,
    SEVERAL,
    UnknownLabelError,
    along,
)

THREE = np.arange(3)


def test_a_label_depends_on_one_dim_alone():
    assert along(1, 3, THREE).tolist() == [[[0], [1], [2]]]
    assert labels.has_no_example(NO_EXAMPLES) and not labels.has_no_example(along(0, 1, THREE))
    assert not labels.has_no_example(np.array([NO_EXAMPLE, SEVERAL]))


def test_labels_get_dims_in_front():
    assert labels.of_rank(along(0, 1, THREE), 3).shape == (1, 1, 3)
    assert labels.whole(along(0, 1, THREE), [2, 3]).tolist() == [[0, 1, 2]] * 2
    with pytest.raises(UnknownLabelError):
        labels.of_rank(along(0, 2, THREE), 1)
    with pytest.raises(UnknownLabelError):
        labels.whole(along(0, 1, THREE), [2, 4])


def test_independent_dims_of_a_label_have_size_1():
    same = np.repeat(along(0, 2, THREE), 4, axis=1)
    assert labels.compressed(same).tolist() == [[0], [1], [2]]
    assert labels.compressed(np.broadcast_to(along(1, 2, THREE), [5, 3])).shape == (1, 3)
    differing = np.array([[0, 1], [1, 0]])
    assert labels.compressed(differing).tolist() == differing.tolist()
    with pytest.raises(UnknownLabelError):
        labels.compressed(np.zeros([0, 3], np.int32))
    with pytest.raises(UnknownLabelError):
        labels.compressed(np.zeros([1 << 13, 1 << 12], np.int32) + np.arange(1 << 12))


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (2, 2, 2),
        (2, 1, SEVERAL),
        (2, NO_EXAMPLE, 2),
        (NO_EXAMPLE, NO_EXAMPLE, NO_EXAMPLE),
        (SEVERAL, NO_EXAMPLE, SEVERAL),
        (SEVERAL, 1, SEVERAL),
    ],
)
def test_joined_labels(one, other, both):
    for pair in [(one, other), (other, one)]:
        assert labels.joined([np.array([number]) for number in pair]).tolist() == [both]


def test_labels_meet_as_tensors_are_broadcast():
    pairs = labels.joined([along(0, 2, THREE[:2]), along(0, 1, THREE[:2])])
    assert pairs.tolist() == [[0, SEVERAL], [SEVERAL, 1]]
    with pytest.raises(UnknownLabelError):
        labels.joined([along(0, 1, THREE), along(0, 1, THREE[:2])])


@pytest.mark.parametrize(
    ("row", "reduced"),
    [
        ([1, 1, 1], 1),
        ([0, 1, 2], NO_EXAMPLE),
        ([NO_EXAMPLE, 2, NO_EXAMPLE], 2),
        ([NO_EXAMPLE, NO_EXAMPLE], NO_EXAMPLE),
        ([1, SEVERAL, 1], SEVERAL),
    ],
)
def test_sums_over_several_examples_belong_to_none(row, reduced):
    assert labels.reduced(np.array([row, row]), [1]).tolist() == [[reduced]] * 2
    assert labels.reduced(np.array([row]), [0]).tolist() == [row]


@pytest.mark.parametrize(
    ("old", "new"), [([2, 3, 4], [6, 4]), ([2, 3, 4], [2, 12]), ([2, 3, 4], [1, 2, 3, 2, 2])]
)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_labels_are_reshaped_as_their_tensors(old, new, dim):
    label = along(dim, 3, np.arange(old[dim]))
    found = labels.whole(labels.reshaped(label, old, new), new)
    np.testing.assert_array_equal(found, labels.whole(label, old).reshape(new))


def test_dims_that_are_neither_cut_nor_joined_stay_small():
    assert labels.reshaped(along(0, 3, THREE), [3, 4, 5], [3, 20]).shape == (3, 1)


def test_labels_are_joined_along_a_dim():
    found = labels.concatenated([along(1, 2, THREE), NO_EXAMPLES], [[2, 3], [2, 1]], 1)
    assert found.tolist() == [[0, 1, 2, NO_EXAMPLE]]
    found = labels.concatenated([along(1, 2, THREE), NO_EXAMPLES], [[1, 3], [2, 3]], 0)
    assert found.tolist() == [[0, 1, 2], [NO_EXAMPLE] * 3, [NO_EXAMPLE] * 3]
