"""What the n-gram baseline gives to KenLM's programs and makes of their answers."""

import math
import re
import shutil

import pytest

from models.one_billion_word.corpus import Sentences
from models.one_billion_word.vocabulary import train_vocabulary

TEXT = [f"the cat number {n} sat on the mat and it was a cat" for n in range(40)]
TEXT += ["the dog sat on the mat and it was not a cat"] * 3


@pytest.fixture(scope="module")
def vocabulary():
    return train_vocabulary(Sentences(tuple(TEXT)), 290)


class Counting:
    """Stands for the programs: a token costs one nat, and so does the end of a line."""

    def __init__(self, programs):
        self.asked = []
        self._costs = programs.Costs

    def costs(self, setting, learned, scored, *, vocabulary_size=0):
        self.asked.append((setting, learned.read_text(), scored.read_text(), vocabulary_size))
        return self._costs(float(len(re.findall(r"\S+|\n", self.asked[-1][2]))), ngrams=7)


def test_tuning_has_a_part_of_its_own(modules_of):
    (run,) = modules_of("ngram", "run")
    text = [str(n) for n in range(5 * run.RUN * run.ONE_RUN_IN)]
    for_tuning = list(run.part(text, for_tuning=True))
    others = list(run.part(text, for_tuning=False))
    assert len(for_tuning) == 5 * run.RUN
    assert sorted(for_tuning + others) == sorted(text)
    # Sentences of one page stand together.
    assert int(for_tuning[run.RUN - 1]) - int(for_tuning[0]) == run.RUN - 1


def test_tuning_takes_no_more_than_it_needs(modules_of, monkeypatch):
    (run,) = modules_of("ngram", "run")
    monkeypatch.setattr(run, "MOST", 300)
    text = [str(n) for n in range(5 * run.RUN * run.ONE_RUN_IN)]
    assert len(list(run.part(text, for_tuning=True))) == 300


def test_pieces_are_what_the_trainer_predicts(modules_of, vocabulary, tmp_path):
    programs, units = modules_of("ngram", "programs", "units")
    kenlm = Counting(programs)
    scored = ["the cat", "xyz"]
    model = units.Pieces(units.Source(kenlm, vocabulary, tmp_path, lambda: TEXT, lambda: scored))
    found = model.costs(programs.Setting(3))
    counted = units.unpredicted(scored, vocabulary)
    assert found.nats == counted.tokens
    assert (counted.words, counted.bytes) == (2 + 1 + 2, len("the cat\nxyz\n"))
    _, learned, asked, size = kenlm.asked[0]
    assert len(learned.splitlines()) == len(TEXT)
    assert asked.split() == [str(i) for s in scored for i in vocabulary.encode(s)]
    # All pieces but those for the unknown and the begin of a sentence may follow.
    assert size == vocabulary.size - 2


def test_rare_words_are_spelled(modules_of, vocabulary, tmp_path):
    programs, units = modules_of("ngram", "programs", "units")
    kenlm = Counting(programs)
    model = units.Words(
        units.Source(
            kenlm, vocabulary, tmp_path, lambda: TEXT, lambda: ["the dog 7", "the  new cat"]
        )
    )
    found = model.costs(programs.Setting(2))
    (_, rare, spelled, _), (_, learned, asked, _) = kenlm.asked
    # A number stands in the text once, the dog thrice; between two spaces there is a word as well.
    assert learned.split().count("rare") == 40
    assert [line.split().count("rare") for line in asked.splitlines()] == [1, 2]
    assert len(rare.splitlines()) == 40
    spelling = [vocabulary.encode(word) for word in ["7", "", "new"]]
    assert [line.split() for line in spelled.splitlines()] == [
        [str(piece) for piece in word] for word in spelling
    ]
    assert found.nats == (3 + 1) + (4 + 1) + sum(len(word) + 1 for word in spelling)
    assert found.ngrams == 14


def test_missing_programs_are_named(modules_of, tmp_path):
    (programs,) = modules_of("ngram", "programs")
    with pytest.raises(SystemExit, match=r"no lmplz in --kenlm=.*README"):
        programs.KenLM(str(tmp_path))


def test_scores_add_up(modules_of):
    (programs,) = modules_of("ngram", "programs")
    assert programs.total(
        "Total: -2 OOV: 0\nTotal: -0.25 OOV: 3\nPerplexity: 3\n"
    ) == pytest.approx(2.25 * math.log(10))


@pytest.mark.skipif(not shutil.which("lmplz"), reason="KenLM is not on PATH")
@pytest.mark.parametrize("context", [[], [5], [2, 3], [29, 30]], ids=str)
def test_what_may_follow_has_probability_one(modules_of, tmp_path, context):
    """Tokens that the text does not have share what is left for them."""
    (programs,) = modules_of("ngram", "programs")
    kenlm = programs.KenLM()
    learned, scored, arpa = (tmp_path / name for name in ("learned", "scored", "model.arpa"))
    text = [[1, 2, 3, 4], [2, 3, 4, 5, 5], [7, 2, 3, 9], [1, 1, 2, 8, 6], [3, 2, 3, 4]]
    programs.write_lines(learned, text)
    tokens = range(1, 31)
    kenlm._estimate(programs.Setting(3), learned, arpa, len(tokens) + 1)
    programs.write_lines(scored, [*([*context, token] for token in tokens), context])
    words = kenlm._run("query", "-v", "word", str(arpa), text=scored)
    decades, position = [], 0
    for word, decade in re.findall(r"(\S+)=\d+ \d+ (\S+)", words):
        if position == len(context):
            decades.append(float(decade))
        position = 0 if word == "</s>" else position + 1
    assert len(decades) == len(tokens) + 1
    assert sum(10**decade for decade in decades) == pytest.approx(1, rel=1e-5)
