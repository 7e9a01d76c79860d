"""`pipemesh.decode` and `pipemesh.score` from Python, which loads no TensorFlow."""

import subprocess
import sys

import pytest

import pipemesh
from pipemesh.errors import DecodingError
from tests.models.one_billion_word.program import finish, open_process
from tests.warm import warm

FLAGS = ["--steps=2", "--vocab_size=400", "--sequence_length=32", "--batch_size=4"]
FLAGS += ["--plain", "--eval_batches=1"]
# The second one has characters that begin files and end lines elsewhere.
TEXTS = ["The module", "\ufeffAn\u2028ex\x0bpression\r"]


@pytest.mark.slow
def test_texts_are_continued_and_scored(tmp_path, monkeypatch):
    code = "import sys; from models.one_billion_word import train; train.main(sys.argv)"
    logdir = tmp_path / "run"
    code, _, err = finish(open_process(warm("-c", code, *FLAGS, f"--logdir={logdir}")))
    assert code == 0, err
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda words, **how: run(warm(*words[1:]), **how))
    found = pipemesh.decode(TEXTS, logdir=logdir, max_tokens=3, beams=2)
    assert [each.prompt for each in found] == TEXTS
    for each in found:
        assert len(each.tokens) == len(each.log_probs) == 3 or each.stopped
        assert len(each.others) == 1 and each.others[0][1] <= sum(each.log_probs)
    scores = pipemesh.score(iter(TEXTS), checkpoint=logdir / "ckpt-2", plain=True)
    assert [each.text for each in scores] == TEXTS
    for each in scores:
        assert len(each.tokens) == len(each.log_probs) and each.perplexity > 1
        assert each.log_prob == pytest.approx(sum(each.log_probs), abs=1e-4)


@pytest.mark.parametrize(
    ("texts", "flags", "message"),
    [
        ("one", {}, "'one' is one text; give a list of them"),
        (["a\nb"], {}, r"text 1 is 'a\\nb'; give texts of one line each"),
        (["a", " "], {}, "text 2 is ' '; give texts of one line each"),
        ([b"a"], {}, "text 1 is b'a'; give texts of one line each"),
        (["a\ud800"], {}, "which is not UTF-8"),
        (["a"], {"help": True}, "help is for the command alone; leave it out"),
        (["a"], {"prompt": "b"}, "prompt is for the command alone; leave it out"),
        (["a"], {}, "no training is named; give the --logdir of one, or a --checkpoint"),
        (["a"], {"logdir": "/no/such"}, "--logdir='/no/such' has no checkpoint; train first"),
    ],
)
def test_what_cannot_be_had_is_an_error(texts, flags, message):
    with pytest.raises(DecodingError, match=message):
        pipemesh.decode(texts, **flags)


def test_nothing_is_nothing_and_loads_no_tensorflow():
    assert pipemesh.decode([]) == [] == pipemesh.score(iter(()))
    code = "import sys, pipemesh; pipemesh.decode([]); sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
