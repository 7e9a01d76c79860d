"""Rows are corrupted as the papers say, and as a function of seed and row alone."""

import itertools
import json
import types
from typing import Any

import numpy as np
import pytest

from pipemesh.data import DocumentBatches, MaskedTokens, SpanCorruption
from pipemesh.errors import DataError

VOCAB, END, MASK, FIRST_SENTINEL, SENTINELS = 1000, 1, 4, 900, 12
SPECIAL = {"[CLS]": 2, "[SEP]": 3, "[MASK]": MASK, "[PAD]": 0}
LENGTH = 64


def tokenizer(sentinels=SENTINELS, special=SPECIAL, end=END):
    """Texts are numbers of tokens, or special ones."""
    known = special | {f"<extra_id_{i}>": FIRST_SENTINEL - i for i in range(sentinels)}

    def spans(text, begins):
        ids = [known.get(word, 5) for word in text.split()]
        return ids, [(0, 0)] * len(ids)

    return types.SimpleNamespace(template=None, special={}, end=end, spans=spans)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Documents of tokens that occur once each; all but one end with the end."""
    path = tmp_path_factory.mktemp("data") / "a.jsonl"
    sizes, at, lines = [200, 1, 2, 30, 77, 300, 64], 10, []
    for size in sizes:
        ids = [*range(at, at + size), END]
        lines.append(json.dumps({"ids": ids[: -1 if size == 64 else None]}))
        at += size
    path.write_text("\n".join(lines))
    return str(path)


def batches_of(path, corruption, seed=None, packing="split", **changes):
    spelling: Any = tokenizer(**changes)
    return DocumentBatches(
        path, lambda: (spelling, VOCAB), LENGTH, 2, packing, seed, corruption=corruption
    )


def rows_of(batches, number=None):
    dataset = batches() if number is None else batches().take(number)
    for batch in dataset.as_numpy_iterator():
        for row in range(len(batch["ids"])):
            yield {name: values[row] for name, values in batch.items()}


def segments(row, name=""):
    """The tokens of each segment of a row, and where they are."""
    ids = row[f"{name}segment_ids"]
    return [np.flatnonzero(ids == number) for number in range(1, ids.max() + 1)]


def restored(source, target):
    """The text before its spans were replaced."""
    spans, last = {}, None
    for token in target:
        if FIRST_SENTINEL - SENTINELS < token <= FIRST_SENTINEL:
            last = token
            spans[last] = []
        else:
            spans[last].append(token)
    return [t for token in source for t in spans.pop(token, [token])], spans


@pytest.mark.parametrize("packing", ["split", "single"])
def test_source_and_target_give_back_the_document(path, packing):
    found = []
    for row in rows_of(batches_of(path, SpanCorruption(), packing=packing)):
        sources, targets = segments(row, "source_"), segments(row)
        for source, target in zip(sources, targets, strict=True):
            ids, labels = row["ids"][target], row["labels"][target]
            # The decoder reads the labels before.
            assert ids.tolist() == [0, *labels[:-1]] and labels[-1] == END
            source = row["source_ids"][source].tolist()
            text, left = restored(source, labels[:-1].tolist())
            assert not left
            found += [token for token in text if token != END]
            # Kept and replaced spans alternate, and begin with a kept one.
            first = [token >= FIRST_SENTINEL - SENTINELS for token in source]
            assert not first[0] and not any(a and b for a, b in itertools.pairwise(first))
            size, spans = len(text) - (text[-1] == END), sum(first)
            assert (len(labels) - 1 - spans, spans) == SpanCorruption().sizes(size)
        assert row["weights"].sum() == sum(map(len, targets))
    wanted = range(10, 684) if packing == "split" else None
    assert found == list(wanted) if wanted else set(found) < set(range(10, 684))


def test_spans_have_the_rate_and_mean_of_the_paper():
    sizes = SpanCorruption()
    assert [sizes.sizes(n) for n in (0, 1, 2, 3, 512)] == [(0, 0), (0, 0), (1, 1), (1, 1), (77, 26)]
    noise, spans = np.sum([sizes.sizes(n) for n in range(100, 600)], 0)
    np.testing.assert_allclose([noise / sum(range(100, 600)), noise / spans], [0.15, 3], rtol=0.01)


def test_lengths_of_spans_are_random(path):
    lengths = set()
    for row in rows_of(batches_of(path, SpanCorruption(), seed=3, packing="single"), 20):
        begins = np.flatnonzero(row["labels"] > FIRST_SENTINEL - SENTINELS)
        lengths |= set(np.diff(begins) - 1)
    assert lengths >= {1, 2, 3, 4, 5}


def test_masked_tokens_have_the_rates_of_the_paper(path):
    masked = kept = other = may = count = 0
    for row in rows_of(batches_of(path, MaskedTokens(), seed=3), 300):
        chosen = row["weights"] > 0
        real = (row["segment_ids"] > 0) & (row["labels"] != END)
        for segment in segments(row):
            # END is no special token by its name.
            number = len(segment)
            assert chosen[segment].sum() == max(1, round(0.15 * number))
        same = row["ids"] == row["labels"]
        assert same[~chosen].all()
        may, count = may + real.sum(), count + chosen.sum()
        masked += (row["ids"][chosen] == MASK).sum()
        kept += same[chosen].sum()
        other += (~same & chosen & (row["ids"] != MASK)).sum()
    assert abs(count / may - 0.15) < 0.01
    found = np.array([masked, kept, other]) / count
    np.testing.assert_allclose(found, [0.8, 0.1, 0.1], atol=0.012)


def test_special_tokens_and_tokens_without_weight_stay(tmp_path):
    path = tmp_path / "a.jsonl"
    ids = [2, *range(10, 25), 3, 0, MASK]
    weights = [1.0] * 5 + [0.0] * 5 + [0.5] * 9
    path.write_text(json.dumps({"ids": ids, "weights": weights}))
    places = set()
    for row in rows_of(batches_of(str(path), MaskedTokens(), seed=1), 60):
        found = np.flatnonzero(row["weights"])
        np.testing.assert_array_equal(row["weights"][found], np.array(weights, np.float32)[found])
        places |= set(found)
    assert places == {1, 2, 3, 4, *range(10, 16)}


@pytest.mark.parametrize("corruption", [MaskedTokens(), SpanCorruption()])
def test_a_row_is_a_function_of_seed_and_number(path, corruption):
    batches = batches_of(path, corruption, seed=7)
    wanted = list(rows_of(batches, 12))
    found: Any = next(iter(batches().skip(5).take(1).as_numpy_iterator()))
    for name, values in found.items():
        np.testing.assert_array_equal(values[1], wanted[11][name], err_msg=name)
    name = "labels" if isinstance(corruption, SpanCorruption) else "ids"
    other = list(rows_of(batches_of(path, corruption, seed=8), 12))
    assert any((a[name] != b[name]).any() for a, b in zip(wanted, other, strict=True))
    # Held-out rows are always the same; in another epoch a row is corrupted otherwise.
    first, second = (list(rows_of(batches_of(path, corruption))) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize(
    ("corruption", "changes", "told"),
    [
        (SpanCorruption(), {"sentinels": 2}, "it has 2 of the first"),
        (SpanCorruption(), {"end": None}, "and no end"),
        (MaskedTokens(), {"special": {}}, "need a tokenizer with a mask_token"),
    ],
)
def test_a_tokenizer_without_the_tokens_is_an_error(path, corruption, changes, told):
    with pytest.raises(DataError, match=told):
        batches_of(path, corruption, **changes)()


def test_documents_with_prompts_have_no_spans(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"ids": [10, 11, 12, 13], "weights": [0, 0, 1, 1]}))
    with pytest.raises(DataError, match="a source has prompts or weights; give texts"):
        batches_of(str(path), SpanCorruption())()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: MaskedTokens(1.0), "rate of a corruption is 1.0; give a number above 0 and"),
        (lambda: SpanCorruption(rate=0), "rate of a corruption is 0"),
        (lambda: SpanCorruption(mean_span=0.5), "mean_span is 0.5; give 1 or more"),
    ],
)
def test_rates_beyond_their_range_are_errors(make, told):
    with pytest.raises(DataError, match=told):
        make()
