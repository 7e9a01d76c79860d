"""What modified Kneser-Ney models make of the held-out text of the language model example."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from programs import KenLM, Setting
from units import UNITS, Source, Unit, pieces, unpredicted

from models.one_billion_word import metrics
from models.one_billion_word.corpus import Corpus, load_corpus
from models.one_billion_word.unigram import fit_unigram
from models.one_billion_word.vocabulary import Vocabulary, load_vocabulary
from pipemesh.errors import PipemeshError

# Settings are chosen by a part of the training text: of so many sentences in a row one run in so
# many, and no more sentences than that.
RUN, ONE_RUN_IN, MOST = 100, 20, 50_000
# Of n-grams from three tokens on, those that occur once.
SINGLETONS = (0, 0, 1)


@dataclasses.dataclass(frozen=True)
class Context:
    """What all models need."""

    kenlm: KenLM
    folder: Path


def is_for_tuning(position: int) -> bool:
    """Whether the sentence at that position of the training text is for choosing a setting."""
    run, _ = divmod(position, RUN)
    return run % ONE_RUN_IN == ONE_RUN_IN - 1 and position < MOST * ONE_RUN_IN


def part(sentences: Iterable[str], *, for_tuning: bool) -> Iterator[str]:
    """The sentences that are for choosing a setting, or the others."""
    for position, sentence in enumerate(sentences):
        if is_for_tuning(position) == for_tuning:
            yield sentence


def settings(orders: Iterable[int]) -> list[Setting]:
    """What is tried."""
    return [
        Setting(order, prune)
        for order in orders
        for prune in [(0,), *([SINGLETONS] if order > 2 else [])]
    ]


def tune(
    unit: type[Unit], tried: list[Setting], corpus: Corpus, vocabulary: Vocabulary, context: Context
) -> Setting:
    """The best setting for the part of the training text that is for it; prints all."""

    def fitted() -> Iterator[str]:
        return part(corpus.train, for_tuning=False)

    def judged() -> Iterator[str]:
        return part(corpus.train, for_tuning=True)

    nothing = unpredicted(judged(), vocabulary)
    if not nothing.tokens:
        sys.exit(
            f"the training text is too short to tune on; it needs {RUN * ONE_RUN_IN} sentences"
        )
    model = unit(Source(context.kenlm, vocabulary, context.folder, fitted, judged))
    scores = {}
    for setting in tried:
        found = model.costs(setting)
        scores[setting] = dataclasses.replace(nothing, nats=found.nats).bits_per_byte
        print(f"    tuning, {setting}: {scores[setting]:.4f} bits/byte", flush=True)
    return min(tried, key=scores.__getitem__)


def unigram_score(corpus: Corpus, vocabulary: Vocabulary) -> metrics.Score:
    """The example's own unigram model."""
    unigram = fit_unigram(corpus.train, vocabulary, max_tokens=sys.maxsize)
    total = metrics.Score()
    for ids in pieces(corpus.heldout, vocabulary):
        labels = np.array([*ids, vocabulary.eos_id])
        total += metrics.score(unigram.nats[labels], labels, np.ones(len(labels)), vocabulary)
    return total


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table."""

    unit: str
    order: int
    prune: str
    chosen: bool
    ngrams: int
    bits_per_byte: float
    token_perplexity: float
    word_perplexity: float


def row(unit: str, setting: Setting, score: metrics.Score, ngrams: int, chosen: bool) -> Row:
    return Row(
        unit=unit,
        order=setting.order,
        prune=" ".join(map(str, setting.prune)) if any(setting.prune) else "",
        chosen=chosen,
        ngrams=ngrams,
        bits_per_byte=score.bits_per_byte,
        token_perplexity=score.token_perplexity,
        word_perplexity=score.word_perplexity,
    )


def measure(arguments, corpus: Corpus, vocabulary: Vocabulary, context: Context) -> list[Row]:
    rows = [row("pieces", Setting(1), unigram_score(corpus, vocabulary), vocabulary.size, False)]
    tried = settings(range(2, arguments.max_order + 1))
    nothing = unpredicted(corpus.heldout, vocabulary)
    for name in arguments.units.split(","):
        print(name, flush=True)
        unit = UNITS[name]
        best = tune(unit, tried, corpus, vocabulary, context)
        model = unit(
            Source(
                context.kenlm,
                vocabulary,
                context.folder,
                lambda: corpus.train,
                lambda: corpus.heldout,
            )
        )
        for setting in tried:
            if any(setting.prune) and setting != best:
                continue
            found = model.costs(setting)
            score = dataclasses.replace(nothing, nats=found.nats)
            rows.append(row(name, setting, score, found.ngrams, setting == best))
    return rows


def report(rows: list[Row]) -> None:
    print("| of | order | pruned | n-grams | bits/byte | perplexity a token | a word |")
    print("|---|--:|---|--:|--:|--:|--:|")
    for one in rows:
        mark = "**" if one.chosen else ""
        print(
            f"| {one.unit} | {one.order} | {one.prune} | {one.ngrams:,} "
            f"| {mark}{one.bits_per_byte:.4f}{mark} | {one.token_perplexity:.2f} "
            f"| {mark}{one.word_perplexity:.2f}{mark} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in ("data_dir", "train_pattern", "heldout_pattern"):
        parser.add_argument(f"--{flag}", help="as the example's trainer has it")
    parser.add_argument("--vocab_size", type=int, default=2048, help="pieces of the vocabulary")
    parser.add_argument("--max_order", type=int, default=6, help="2 to 6")
    parser.add_argument("--units", default="pieces,words", help="pieces, words, or both")
    parser.add_argument("--kenlm", help="folder of KenLM's programs lmplz and query")
    parser.add_argument("--cache_dir", help="where the vocabulary is looked for and kept")
    parser.add_argument("--out", default=str(Path(__file__).with_name("result.json")))
    arguments = parser.parse_args()
    if unknown := set(arguments.units.split(",")) - set(UNITS):
        parser.error(f"--units has {min(unknown)!r}; known are {', '.join(UNITS)}")
    if not 2 <= arguments.max_order <= 6:
        parser.error(f"--max_order={arguments.max_order}; KenLM makes models of order 2 to 6")
    kenlm = KenLM(arguments.kenlm)
    with tempfile.TemporaryDirectory() as folder:
        try:
            corpus = load_corpus(
                arguments.data_dir, arguments.train_pattern, arguments.heldout_pattern
            )
            vocabulary = load_vocabulary(
                corpus, arguments.vocab_size, arguments.cache_dir or folder
            )
        except PipemeshError as error:
            sys.exit(str(error))
        rows = measure(arguments, corpus, vocabulary, Context(kenlm, Path(folder)))
    report(rows)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "text": corpus.name,
        "vocab_size": arguments.vocab_size,
        "heldout": dataclasses.asdict(unpredicted(corpus.heldout, vocabulary)),
        "rows": [dataclasses.asdict(one) for one in rows],
    }
    Path(arguments.out).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
