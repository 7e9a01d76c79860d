"""Pairs: sources that an encoder reads, and their targets, packed without leaks."""

import json

import numpy as np
import pytest

from pipemesh.data import Document, DocumentBatches, documents_of, parse_sources
from pipemesh.data.rows import PairRows, Tokens
from pipemesh.data.sources import rows_of
from pipemesh.errors import DataError

PAIRS = [("a b", "x"), ("c", "y z w"), ("d e f", "u v")]
BOS, EOS = 1, 2


class Spelling:
    """A token for each character; a text begins and ends with one."""

    template, special, end = None, {}, EOS

    def spans(self, text, begins):
        ids = [BOS] * begins + [ord(character) for character in text]
        return ids, [(0, 0)] * len(ids)


def made(sizes):
    """Pairs with tokens that occur once."""
    for number, (source, target) in enumerate(sizes):
        yield Document(1000 * (number + 1) + np.arange(source + target), None, source)


@pytest.mark.parametrize("packing", ["whole", "single"])
def test_each_target_is_in_the_segment_of_its_source(packing):
    rng = np.random.default_rng(0)
    # Each third pair is too long on one side.
    sizes = [(n, m) for n, m in rng.integers(1, 14, [60, 2])]
    fitting = [i for i, (n, m) in enumerate(sizes) if n <= 8 and 1 < m <= 10]
    rows = PairRows("a", Tokens(made(sizes)), (8, 9), packing)
    found = []
    for number in range(len(rows)):
        row = rows.read(number)
        assert len(row["source_ids"]) == 8 and len(row["ids"]) == 9
        begins = [np.cumsum(row[f"{side}begins"]) for side in ("source_", "")]
        reals = [row[f"{side}real"] > 0 for side in ("source_", "")]
        for segment in range(1, begins[0].max() + 1):
            source, target = (r & (b == segment) for r, b in zip(reals, begins, strict=True))
            ids = row["source_ids"][source].tolist() + row["ids"][target].tolist()
            pair = ids[0] // 1000 - 1
            found.append(pair)
            assert ids + row["labels"][target].tolist()[-1:] == [
                1000 * (pair + 1) + i for i in range(sum(sizes[pair]))
            ]
            assert (row["labels"][target][:-1] == row["ids"][target][1:]).all()
        assert (row["weights"] > 0).tolist() == reals[1].tolist()
    assert sorted(found) == fitting
    counts = rows.counts
    assert counts.documents == 60 and counts.too_long == sum(n > 8 or m > 10 for n, m in sizes)
    assert f"longer than a row and left out: {counts.too_long}" in str(counts)
    if packing == "whole":
        used = np.array([sizes[i] for i in fitting]).sum(0) - [0, len(fitting)]
        assert len(rows) < 1.4 * max(used / [8, 9])
    else:
        assert len(rows) == len(fitting)


@pytest.fixture
def folder(tmp_path):
    """The same pairs in every format."""
    lines = [json.dumps({"prompt": a, "completion": b}) for a, b in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    (tmp_path / "pairs.tsv").write_text("\n".join(map("\t".join, PAIRS)) + "\n\n")
    for number, name in enumerate(("pairs.en", "pairs.de")):
        sides = "".join(f"{pair[number]}\r\n" for pair in PAIRS[:2])
        (tmp_path / name).write_text(f"\ufeff{sides}\n{PAIRS[2][number]}")
    return tmp_path


def test_two_files_and_tables_are_pairs(folder):
    wanted = [{"prompt": a, "completion": b} for a, b in PAIRS]
    (folder / "mix.toml").write_text('[[source]]\npath = "pairs.en"\ncompletions = "pairs.de"\n')
    for text in ("pairs.jsonl", "pairs.tsv", f"pairs.en+{folder}/pairs.de*0.5", "mix.toml"):
        (source,) = parse_sources(f"{folder}/{text}")
        assert [row for _, row in rows_of(source)] == wanted, text
    assert source.completions == f"{folder}/pairs.de"
    documents = list(documents_of(source, Spelling(), 256, pairs=True))
    ids = [ord(c) for c in "a b"] + [EOS, BOS, ord("x"), EOS]
    assert documents[0].ids.tolist() == ids and documents[0].source == 4


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (b"a\nb\n", b"x\n", r"b' has 1 lines and '.*a' has more; give a completion for each"),
        (b"a\nb\n", b"x\n\n", r"line 2: completion is empty; give both sides of a pair"),
        (b"a\nb", b"x\n\xff\n", r"a' and '.*b', line 2 is not UTF-8"),
    ],
)
def test_uneven_and_damaged_files_are_errors(tmp_path, first, second, message):
    for name, content in (("a", first), ("b", second)):
        (tmp_path / name).write_bytes(content)
    (source,) = parse_sources(f"{tmp_path}/a+{tmp_path}/b")
    with pytest.raises(DataError, match=message):
        list(documents_of(source, Spelling(), 256, pairs=True))


def test_a_table_has_two_columns(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\na\tb\tc\n")
    with pytest.raises(DataError, match=r"a\.tsv', line 2 has 3 columns; each line must be a prom"):
        list(rows_of(parse_sources(f"{tmp_path}/a.tsv")[0]))


def test_fields_of_a_table_swap_its_columns_or_are_refused(tmp_path):
    """Other names lost the prompt: lines had a completion alone."""
    (tmp_path / "a.tsv").write_text("a\tb\n")
    table = "[[source]]\npath = 'a.tsv'\nfields = {{prompt = '{}', completion = '{}'}}\n"
    (tmp_path / "swapped.toml").write_text(table.format("completion", "prompt"))
    ((_, row),) = rows_of(parse_sources(f"{tmp_path}/swapped.toml")[0])
    assert row == {"prompt": "b", "completion": "a"}
    (tmp_path / "other.toml").write_text(table.format("question", "completion"))
    told = "a.tsv' has no 'question', .* columns are prompt and completion, .*leave prompt out"
    with pytest.raises(DataError, match=told):
        list(rows_of(parse_sources(f"{tmp_path}/other.toml")[0]))


def test_a_plus_may_be_part_of_a_pattern(tmp_path):
    for name in ("c++1.tsv", "c++2.tsv"):
        (tmp_path / name).write_text("a\tb\n")
    (source,) = parse_sources(f"{tmp_path}/c++*.tsv")
    assert source.completions is None and len(list(rows_of(source))) == 2


def test_two_files_are_two_files_of_lines(tmp_path):
    for name in ("a1", "a2", "b"):
        (tmp_path / name).write_text("x\n")
    (source,) = parse_sources(f"{tmp_path}/a?+{tmp_path}/b")
    with pytest.raises(DataError, match=r"matches 2 files, but '.*b' has the completions of one"):
        list(rows_of(source))
    table = tmp_path / "sources.toml"
    table.write_text('[[source]]\npath = "a1"\ncompletions = "b"\nformat = "jsonl"\n')
    with pytest.raises(DataError, match=r"two files of lines, which have no format; leave one"):
        parse_sources(str(table))


def batches(folder, seed=None, **changes):
    return DocumentBatches(
        f"{folder}/pairs.tsv",
        lambda: (Spelling(), 256),
        6,
        2,
        source_length=7,
        seed=seed,
        **changes,
    )


def test_batches_are_a_function_of_seed_and_number(folder):
    once = [{name: value.numpy() for name, value in batch.items()} for batch in batches(folder)()]
    assert sum(len(batch["ids"]) for batch in once) == 3
    assert sum(batch["weights"].sum() for batch in once) == 12
    first, again, other = (iter(batches(folder, seed)()) for seed in (5, 5, 6))
    read = [
        [next(each)["source_ids"].numpy().tolist() for _ in range(8)]
        for each in (first, again, other)
    ]
    assert read[0] == read[1] != read[2]
    assert batches(folder).digests["source_length"] == "7"


def test_pairs_in_buckets_have_the_length_of_their_longer_side(folder):
    """Rows of sources may be longer than those of targets; no pair is lost."""
    plain, found = (
        [*batches(folder, 5, packing="single", **more)().take(40)]
        for more in ({}, {"buckets": "3,5"})
    )
    sizes = {(batch["source_ids"].shape[1], batch["ids"].shape[1]) for batch in found}
    assert sizes <= {(3, 3), (5, 5), (7, 6)} and len(sizes) > 1

    def texts(some):
        sources = [row for batch in some for row in batch["source_ids"].numpy().tolist()]
        return {tuple(token for token in row if token) for row in sources}

    assert texts(found) == texts(plain)
    counts = batches(folder, 5, packing="single", buckets="3,5").counts()
    assert all(sum(number for _, number in each.by_length) == each.rows for each in counts)


def test_pairs_are_never_split(folder):
    with pytest.raises(DataError, match="packing='split': pairs are not split"):
        batches(folder, packing="split")()
    (folder / "pairs.tsv").write_text("a b c d e f g\tx\n")
    with pytest.raises(DataError, match=r"no pair that fits into rows of 7 and 6 tokens; give a f"):
        batches(folder)()
