"""`pipemesh decode`, from the command line to the last line."""

import json
import subprocess
import sys

import pytest

from tests.models.one_billion_word.program import finish, open_process, start
from tests.training.command import program
from tests.warm import warm

DECODE = """
import sys
from models.one_billion_word import sizes
sizes.Tiny.NUM_LAYERS = 2
from pipemesh import cli
cli.main(["decode", *sys.argv[1:]])
"""
SPLIT = ["--mesh_shape=layers:2;data:2;model:2"]
SPLIT += ["--layout=batch:data;heads:model;d_ff:model;vocab:model"]
TEXTS = ["The module", "If the", "An expression is", "It", "Python has a number of"]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoded") / "run"
    code, _, err = finish(start("--steps=3", f"--logdir={folder}"))
    assert code == 0, err
    return folder


def run(*flags):
    return finish(open_process(warm("-c", DECODE, *flags)))


def said(*flags):
    """The lines of standard output."""
    code, out, err = run(*flags)
    assert code == 0, err
    return out.splitlines()


@pytest.mark.slow
def test_standard_output_has_the_texts_alone_whatever_the_plan(tmp_path, logdir):
    where = f"--logdir={logdir}"
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(TEXTS) + "\n")
    drawn = [f"--file={file}", "--temperature=0.9", "--top_k=40", "--max_tokens=7"]
    found = said(where, *drawn)
    assert len(found) == len(TEXTS)
    for text, prompt in zip(found, TEXTS, strict=True):
        assert text.startswith(prompt)
    assert said(where, *drawn, *SPLIT, "--groups=3", "--rows=1") == found
    assert said(where, *drawn, "--plain", "--sample_seed=1") != found
    # From a checkpoint alone, whose text is not looked for.
    lines = said(f"--checkpoint={logdir}/ckpt-3", *drawn, "--format=json")
    values = [json.loads(line) for line in lines]
    assert [each["prompt"] for each in values] == TEXTS
    assert [each["text"] for each in values] == found
    for each in values:
        assert len(each["tokens"]) == len(each["log_probs"]) == 7 or each["stopped"]
        assert all(value <= 0 for value in each["log_probs"])


@pytest.mark.slow
def test_prompts_may_come_from_standard_input(logdir):
    command = warm("-c", DECODE, f"--logdir={logdir}", "--file=-", "--max_tokens=2")
    done = subprocess.run(
        command, input="One\nTwo\n", capture_output=True, text=True, timeout=240, check=True
    )
    assert [line[:3] for line in done.stdout.splitlines()] == ["One", "Two"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "what is to be continued? give either --prompt or --file"),
        (["--prompt=a", "--file=b"], "give either --prompt or --file"),
        (["--prompt="], "--prompt='' is empty; give some text"),
        (["--prompt=a " + "word " * 60], "tokens, with 24 more it exceeds the model's 32; give a"),
        (["--prompt=a", "--max_tokens=0"], "max_tokens"),
        (["--prompt=a", "--top_k=4"], "are for drawing; give a temperature above 0"),
        (["--prompt=a", "--schedule=gpipe"], "--schedule is for training; leave it out"),
        (["--prompt=a", "--lowering=simd"], "--lowering is for training; leave it out"),
        (["--prompt=a", "--vocab_size=500"], "checkpoint of another model (vocab_size 400 there"),
        (["--prompt=a", "--mesh_shape=layers:9"], "at most 4 stages"),
        (["--file=/no/such/file"], "--file='/no/such/file' cannot be read"),
        (["--file=/dev/null"], "--file='/dev/null' is empty; give a text a line"),
        (["--prompt=a", "--checkpoint=/no/such"], "there is no checkpoint /no/such"),
    ],
)
def test_what_cannot_be_had_is_one_line(logdir, flags, told):
    code, out, err = run(f"--logdir={logdir}", *flags)
    lines = [line for line in err.splitlines() if not line.endswith(" s")]
    assert (code, out, len(lines)) == (2, "", 1), err
    assert told in lines[0]


@pytest.mark.slow
def test_a_model_that_continues_no_text_is_told_so(tmp_path):
    assert "which training? give the --logdir of one" in program.refused("decode")
    model = "--model=models.digits.params.DigitsPlain"
    program.done("train", model, "--steps=1", f"--logdir={tmp_path}")
    line = program.refused("decode", f"--logdir={tmp_path}", "--prompt=a")
    assert "of models.digits.params.DigitsPlain, which says nothing of decoding" in line


def test_help_needs_no_tensorflow():
    code = "import sys; sys.modules['tensorflow'] = None; from pipemesh import cli; "
    code += "cli.main(['decode', '--help'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and "--max_tokens" in done.stdout, done.stderr
