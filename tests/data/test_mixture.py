"""Mixtures: each row is a function of the seed and its number."""

import collections
import copy
import dataclasses
import itertools
import json

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.saved_state import iterator_state, set_iterator_state
from pipemesh.data import DocumentBatches
from pipemesh.data.mixture import Mixture
from pipemesh.data.rows import Rows, Tokens
from pipemesh.errors import DataError
from tests.data.test_rows import made

LENGTH = 8


def rows_of(number):
    return Rows("a", Tokens(made([LENGTH + 1] * number)), LENGTH, "single")


def places(mixture, count, first=0):
    return [mixture.place(row) for row in range(first, first + count)]


def test_sources_have_their_weights_and_every_epoch_every_row_once():
    sizes = {0: 40, 1: 7, 2: 3}
    mixture = Mixture([rows_of(size) for size in sizes.values()], [6, 3, 1], seed=5)
    found = places(mixture, 3000)
    counts = collections.Counter(source for source, _, _ in found)
    for source, share in ((0, 0.6), (1, 0.3), (2, 0.1)):
        assert counts[source] / 3000 == pytest.approx(share, abs=0.03)
    orders = set()
    for source, size in sizes.items():
        mine = [(epoch, row) for of, epoch, row in found if of == source]
        for epoch, group in itertools.groupby(mine, key=lambda place: place[0]):
            rows = [row for _, row in group]
            assert len(set(rows)) == len(rows)
            if epoch < mine[-1][0]:
                assert set(rows) == set(range(size))
                orders.add((source, *rows))
    assert len(orders) > 100, "the order changes from epoch to epoch"


def test_a_row_does_not_depend_on_those_before(monkeypatch):
    rows = [rows_of(5), rows_of(9)]
    found = places(Mixture(rows, [1, 2], seed=1), 300)
    assert places(Mixture(rows, [1, 2], seed=1), 40, first=200) == found[200:240]
    assert places(Mixture(rows, [1, 2], seed=2), 300) != found
    # Choices go on in the next block.
    monkeypatch.setattr("pipemesh.data.mixture._BLOCK", 64)
    blocks = places(Mixture(rows, [1, 2], seed=1), 300)
    counted = collections.Counter((source, epoch) for source, epoch, _ in blocks)
    assert all(counted[source, epoch] == (5, 9)[source] for source, epoch in [(0, 1), (1, 3)])
    assert places(Mixture(rows, [1, 2], seed=1), 9, first=250) == blocks[250:259]


def test_the_order_is_that_of_all_releases():
    """Checkpoints of older releases go on with the same rows."""
    found = places(Mixture([rows_of(5), rows_of(4)], [1, 1], seed=-3), 8)
    assert found == [
        (0, 0, 4),
        (1, 0, 3),
        (0, 0, 0),
        (0, 0, 1),
        (1, 0, 1),
        (0, 0, 2),
        (1, 0, 0),
        (1, 0, 2),
    ]


def of_files(tmp_path, **more):
    for name, first in (("a", 0), ("b", 5000)):
        lines = (
            json.dumps({"ids": list(range(first + 100 * i, first + 100 * i + 2 + i % 7))})
            for i in range(20)
        )
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return DocumentBatches(f"{tmp_path}/a.jsonl*3,{tmp_path}/b.jsonl", ready, LENGTH, 4, **more)


def ready():
    return None, 10_000


def test_an_iterator_goes_on_exactly_where_it_was_saved(tmp_path):
    batches = of_files(tmp_path, seed=7)
    wanted = [batch["ids"].numpy().tolist() for batch in batches().take(30)]
    iterator = iter(batches().prefetch(3))
    for _ in range(11):
        next(iterator)
    state = iterator_state(iterator)
    later = iter(of_files(tmp_path, seed=7)().prefetch(3))
    set_iterator_state(later, state)
    got = [next(later)["ids"].numpy().tolist() for _ in range(19)]
    assert got == wanted[11:]
    assert batches().cardinality() == tf.data.INFINITE_CARDINALITY
    assert batches().element_spec["ids"].shape == [4, LENGTH]


def test_held_out_rows_come_once_and_in_order(tmp_path):
    batches = of_files(tmp_path)
    found = list(batches())
    assert [len(batch["ids"]) for batch in found[:-1]] == [4] * (len(found) - 1)
    labels = np.concatenate([batch["labels"].numpy().ravel() for batch in found])
    real = np.concatenate([batch["segment_ids"].numpy().ravel() for batch in found]) > 0
    ids = np.concatenate([batch["ids"].numpy().ravel() for batch in found])
    assert (labels[real] == ids[real] + 1).all()
    assert (np.diff(labels[real]) > 0).all()
    assert sum(each.predicted for each in batches.counts()) == real.sum()


@pytest.mark.parametrize("packing", ["single", "whole"])
def test_rows_of_a_batch_have_the_shortest_length_into_which_they_fit(tmp_path, packing):
    plain = of_files(tmp_path, seed=7, packing=packing)
    batches = of_files(tmp_path, seed=7, packing=packing, buckets="2,5")
    rows = {tuple(row) for row in np.concatenate([b["ids"] for b in plain().take(40)]).tolist()}
    specs = {str(spec) for spec in batches.batch_specs()}
    found = collections.defaultdict(list)
    for batch in batches().take(200):
        spec = {name: tf.TensorSpec(value.shape, value.dtype) for name, value in batch.items()}
        assert str(spec) in specs
        ids, real = batch["ids"].numpy(), (batch["segment_ids"] > 0).numpy()
        length = ids.shape[1]
        fits = [bucket for bucket in (2, 5, LENGTH) if real.sum(1).max() <= bucket]
        assert length in fits and real.sum(1).min() > {2: 0, 5: 2, LENGTH: 5}[length]
        found[length] += [tuple(row) for row in ids.tolist()]
    # No row is changed, and each comes as often as its source and its epochs say.
    assert {(*row, *[0] * (LENGTH - len(row))) for mine in found.values() for row in mine} == rows
    shares = {length: len(mine) / 800 for length, mine in found.items()}
    wanted = collections.Counter()
    for counts, weight in zip(batches.counts(), (0.75, 0.25), strict=True):
        assert sum(number for _, number in counts.by_length) == counts.rows
        for length, number in counts.by_length:
            wanted[length] += weight * number / counts.rows
    for length, share in shares.items():
        assert share == pytest.approx(wanted[length], abs=0.08)
    # A batch is a function of the seed and its number.
    iterator = iter(batches())
    for _ in range(11):
        next(iterator)
    state, rest = iterator_state(iterator), [next(iterator)["ids"].numpy() for _ in range(5)]
    later = iter(of_files(tmp_path, seed=7, packing=packing, buckets="2,5")())
    set_iterator_state(later, state)
    assert all((next(later)["ids"].numpy() == ids).all() for ids in rest)


def test_buckets_that_cannot_be_are_refused(tmp_path):
    for buckets in ("8", "1", "two", "2,,4", [2, 4]):
        with pytest.raises(DataError, match=r"buckets=.*: they are lengths from 2 on"):
            of_files(tmp_path, buckets=buckets)
    # The same lengths are the same data.
    spellings = [of_files(tmp_path, seed=7, buckets=text).digests for text in ("2,5", "5, 2,5")]
    assert spellings[0] == spellings[1] and spellings[0]["buckets"] == "2,5"
    batches = of_files(tmp_path, seed=7, packing="split", buckets="4")
    with pytest.raises(DataError, match="rows of one length, since its documents are split"):
        batches()
    # Rows in order have one length.
    held = [batch["ids"].shape[1] for batch in of_files(tmp_path, packing="single", buckets="4")()]
    assert set(held) == {LENGTH}


def test_an_unknown_packing_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"packing is 'hole'.*whole"):
        of_files(tmp_path, packing="hole")


def test_digests_tell_other_files_and_stay_those_of_the_files_that_were_read(tmp_path):
    path = tmp_path / "a.jsonl"
    batches = of_files(tmp_path)
    one = batches.digests
    assert "0x" not in repr(batches) and one == of_files(tmp_path).digests
    # Weights and fields of a table are no part of its name.
    table = '[[source]]\npath = "{}.jsonl"\nweight = {}\n'
    (tmp_path / "mix.toml").write_text(table.format("a", 3) + table.format("b", 1))
    mixed = DocumentBatches(f"{tmp_path}/mix.toml", ready, LENGTH, 4)
    assert mixed.digests == one
    (tmp_path / "mix.toml").write_text(table.format("a", 2) + table.format("b", 1))
    assert mixed.digests == one and mixed() is not None
    other = DocumentBatches(f"{tmp_path}/mix.toml", ready, LENGTH, 4).digests
    assert [name for name in one if one[name] != other[name]] == ["source 1"]
    path.write_text(path.read_text().replace("101", "102"))
    again = dataclasses.replace(batches)
    assert [name for name in one if one[name] != again.digests[name]] == ["source 1"]
    # A run reads the same documents until its end, and no command fails for data that it does not
    # read.
    path.unlink()
    assert copy.deepcopy(batches).digests == batches.digests == one and batches() is not None
    gone = dataclasses.replace(batches)
    with pytest.raises(DataError, match=r"a\.jsonl' cannot be read"):
        gone()
