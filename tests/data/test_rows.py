"""Rows: documents packed without leaks."""

import itertools

import numpy as np
import pytest

from pipemesh.data.documents import Document
from pipemesh.data.rows import Rows, Tokens
from pipemesh.errors import DataError

LENGTH = 8


def made(sizes, weighted=()):
    """Documents with tokens that occur once; half of the tokens of some count."""
    for number, size in enumerate(sizes):
        ids = 100 * (number + 1) + np.arange(size)
        weights = (np.arange(size) >= size // 2).astype(np.float32) if number in weighted else None
        yield Document(ids, weights)


def rows_of(documents, packing, length=LENGTH):
    return Rows("a", Tokens(documents), length, packing)


SIZES = [3, 9, 1, 30, 2, 5, 4, 4, 8, 2, 17]


@pytest.mark.parametrize("packing", ["split", "whole", "single"])
def test_every_token_is_predicted_once_from_its_own_document(packing):
    documents = list(made(SIZES, weighted=[1, 3, 6]))
    rows = rows_of(documents, packing)
    wanted = {}
    for document in documents:
        whole = document.ids if packing == "split" else document.ids[: LENGTH + 1]
        weights = document.weights
        if weights is not None and not weights[1 : len(whole)].any():
            continue
        for at in range(1, len(whole)):
            weight = 1 if weights is None else weights[at]
            wanted[int(whole[at])] = int(whole[at - 1]), weight, at - 1
    got = {}
    for number in range(len(rows)):
        row = rows.read(number)
        real = row["real"] > 0
        assert row["begins"][0] and not row["weights"][~real].any()
        begin = 0
        for at in np.flatnonzero(real):
            begin = at if row["begins"][at] else begin
            label = int(row["labels"][at])
            assert label not in got
            got[label] = int(row["ids"][at]), row["weights"][at], at - begin
    assert got.keys() == wanted.keys()
    for label, (before, weight, place) in wanted.items():
        assert got[label][:2] == (before, weight)
        # Only a document that is split begins again.
        assert got[label][2] == place or packing == "split"


def test_what_was_cut_is_counted():
    whole = rows_of(made(SIZES, weighted=[3]), "whole").counts
    assert (whole.documents, whole.tokens, whole.left_out) == (11, 85, 2)
    # Of the fourth only the second half counts, which would be cut, so it is left out, and no more.
    assert (whole.cut, whole.cut_tokens, whole.split) == (1, 8, 0)
    split = rows_of(made(SIZES), "split").counts
    assert (split.cut, split.left_out, split.predicted) == (0, 1, 85 - 11)
    assert split.rows == -(-74 // LENGTH) and split.split == 5
    assert str(whole).endswith(
        "longer than a row and cut: 1, by 8 tokens; without a token to predict in a row and left "
        "out: 2"
    )


def test_whole_documents_fill_rows_well_and_keep_their_order():
    sizes = [6, 5, 4, 3, 6, 5, 4, 3]
    rows = rows_of(made(sizes), "whole")
    # 5 + 3, 4 + 4 and 3 + 3 + 2 positions would do, if all fitted.
    assert sum(sizes) - len(sizes) == 28 and len(rows) == 4
    firsts = [int(rows.read(number)["ids"][0]) for number in range(len(rows))]
    assert firsts[0] == 100 and firsts == sorted(firsts)
    assert len(rows_of(made(sizes), "single")) == len(sizes)


def test_best_fit_is_within_one_row_of_the_optimum():
    """First fit decreasing needs 11/9 of the rows at most; these are small enough to try all."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        sizes = rng.integers(2, LENGTH + 2, 6)
        best = min(_next_fit(order) for order in itertools.permutations(sizes - 1))
        assert best <= len(rows_of(made(sizes), "whole")) <= best + 1


def _next_fit(sizes):
    rows, room = 0, 0
    for size in sizes:
        if size > room:
            rows, room = rows + 1, LENGTH
        room -= size
    return rows


def test_auto_splits_only_where_every_token_counts():
    assert rows_of(made([30]), "auto").counts.split == 1
    assert rows_of(made([30, 9], weighted=[1]), "auto").counts.cut == 1


@pytest.mark.parametrize(
    "documents, told",
    [
        ([], "data 'a' has no document; give a file with some"),
        (list(made([1, 1])), "has no document with a token to predict in rows of 8 tokens; give"),
        ([Document(np.arange(4), np.zeros(4))], "has no document with a token to predict"),
        (list(made([40], weighted=[0])), "has no document with a token to predict"),
    ],
)
def test_nothing_to_predict_is_refused(documents, told):
    with pytest.raises(DataError, match=told):
        rows_of(documents, "auto")


def test_a_full_disk_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.TemporaryFile", lambda: open("/dev/full", "wb"))
    with pytest.raises(DataError, match=r"tokens cannot be written to .*No space left.*TMPDIR"):
        Tokens(made([10_000] * 4))
