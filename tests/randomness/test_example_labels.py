"""Labels that meet, are reduced, reshaped or unknown; `test_example_flow` has the rest."""

import numpy as np
import pytest

from pipemesh.randomness import example_labels as labels
from pipemesh.randomness.example_labels import (
    NO_EXAMPLE,
    SEVERAL,
    UnknownLabelError,
    along,
)

THREE = np.arange(3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: labels.of_rank(along(0, 2, THREE), 1),
        lambda: labels.whole(along(0, 1, THREE), [2, 4]),
        lambda: labels.compressed(np.zeros([0, 3], np.int32)),
        lambda: labels.compressed(np.arange(6)),
        lambda: labels.joined([along(0, 1, THREE), along(0, 1, THREE[:2])]),
    ],
)
def test_labels_that_do_not_fit_are_unknown(call, monkeypatch):
    monkeypatch.setattr(labels, "_MOST", 5)
    with pytest.raises(UnknownLabelError):
        call()


def test_independent_dims_of_a_label_have_size_1():
    same = np.repeat(along(0, 2, THREE), 4, axis=1)
    assert labels.compressed(same).tolist() == [[0], [1], [2]]
    assert labels.compressed(np.broadcast_to(along(1, 2, THREE), [5, 3])).shape == (1, 3)


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
