"""Ten kinds of text, each read from files, learned a vocabulary of, and trained on for 30 steps.

What ordinary text does to a training: a dictionary's rare words have perplexities beyond a float32,
a line of protein is one word, a file may be one line.
"""

import base64
import gzip
import inspect
import pathlib
import random

import numpy as np
import pytest

from models.one_billion_word.corpus import TextFiles
from pipemesh.checkpoint import newest
from pipemesh.training import trainer as trainer_module
from tests.models.one_billion_word.small_training import scalars, small_request

STEPS = 30
VOCAB_SIZE = 420


def words(rng, letters, longest):
    while True:
        yield "".join(rng.choice(letters) for _ in range(rng.randint(2, longest)))


def dictionary(rng, english):
    """Rare long words, each a line of its own."""
    heads = words(rng, "abcdefghijklmnopqrstuvwxyz", 24)
    return "".join(f"{next(heads)}\n" for _ in range(900)).encode()


def protein(rng, english):
    lines = ("".join(rng.choice("ACDEFGHIKLMNPQRSTVWY") for _ in range(300)) for _ in range(40))
    return "\n".join(lines).encode()


def code(rng, english):
    return (inspect.getsource(trainer_module) + inspect.getsource(base64)).encode()


def other_scripts(rng, english):
    scripts = (
        "\u0430\u0431\u0432\u0433\u0434\u0435",
        "\u05d0\u05d1\u05d2\u05d3",
        "\u3042\u3044\u3046\u3048",
        "\u0915\u093e\u0916\u093f",
    )
    lines = (
        " ".join(
            word for word, _ in zip(words(rng, rng.choice(scripts), 6), range(9), strict=False)
        )
        for _ in range(300)
    )
    return "\n".join(lines).encode()


def one_huge_line(rng, english):
    return " ".join(english * 8).encode() + b"\n"


def empty_lines(rng, english):
    return "\n\n \n\t\n".join(english).encode() + b"\n" * 500


def carriage_returns(rng, english):
    return "\r\n".join(english).encode()


def packed(rng, english):
    return gzip.compress("\n".join(english).encode())


def byte_order_mark(rng, english):
    return b"\xef\xbb\xbf" + "\n".join(english).encode()


def numbers(rng, english):
    return "".join(f"{rng.random():.6f},{rng.randrange(10**6)}\n" for _ in range(900)).encode()


KINDS = [
    dictionary,
    protein,
    code,
    other_scripts,
    one_huge_line,
    empty_lines,
    carriage_returns,
    packed,
    byte_order_mark,
    numbers,
]


# Once these are read, which has tests of its own, they are ordinary text.
ONLY_READ_IN_ANOTHER_WAY = (code, empty_lines, carriage_returns, packed, byte_order_mark, numbers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=pytest.mark.exhaustive if kind in ONLY_READ_IN_ANOTHER_WAY else (),
            id=kind.__name__,
        )
        for kind in KINDS
    ],
)
def test_thirty_steps(kind, corpus, tmp_path, train, capfd):
    rng = random.Random(0)
    english = list(corpus.train.lines[:400])
    (tmp_path / "train").write_bytes(kind(rng, english))
    # The same kind of text, other text.
    (tmp_path / "heldout").write_bytes(kind(rng, list(corpus.heldout.lines[:60])))
    logdir = pathlib.Path(tmp_path / "logdir")
    request = small_request(
        logdir, tmp_path, steps=STEPS, save_every=20, eval_every=10, VOCAB_SIZE=VOCAB_SIZE
    )
    assert train(request) == 0
    assert newest(str(logdir)) == str(logdir / f"ckpt-{STEPS}")
    found = scalars(logdir, "loss")
    assert len(found) == STEPS and np.isfinite(found).all()
    assert np.mean(found[-5:]) < np.mean(found[:5]), "it learned something"
    perplexities = scalars(logdir, "word_perplexity")
    assert len(perplexities) == STEPS
    if kind is protein:
        assert perplexities[0] == np.inf, "more than a float32 holds, once the end of training"
    assert capfd.readouterr().out.count("held out at ") == 1
    sentences = list(TextFiles((str(tmp_path / "train"),)))
    assert sentences and not any("\r" in text or "\ufeff" in text for text in sentences)
