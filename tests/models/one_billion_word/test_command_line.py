"""Help, errors and Ctrl-C: answered without TensorFlow, in one line or on one page."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.commands.program import without_tensorflow
from tests.models.one_billion_word.program import SMALL


def test_help_needs_no_tensorflow_and_is_no_failure():
    for code, out, err in without_tensorflow(["lm", "--help", "--no_such_flag"], ["lm", "-h"]):
        assert (code, err) == (0, "")
        assert out.startswith("usage: lm [--flag=value ...]\n\nTrains the one-billion-word")
        for name in ("--mesh_shape", "--num_microbatches", "--[no]other_text", "--eval_batches"):
            assert name in out


TEXTS = ["--heldout_pattern=heldout", "--data_dir=texts"]
BAD_INPUT = [
    (["--step=3"], ["unknown flag --step; did you mean --steps?"]),
    (["--steps=many"], ["--steps='many': it must be a whole number"]),
    (["trash"], ["'trash' is no flag"]),
    (["--model=OneBillionWordTin"], ["OneBillionWordTiny?"]),
    (["--mesh_shape=layers:x"], ["--mesh_shape='layers:x'"]),
    (["--mesh_shape=layers:8"], ["at most 7 stages"]),
    (
        ["--mesh_shape=layers:2;model:2", "--layout=embed:model"],
        ["--layout='embed:model'", "names dim 'embed', which no tensor has"],
    ),
    (
        ["--mesh_shape=layers:2;model:2", "--layout=heads:model;lenght:model"],
        ["names dim 'lenght', which no tensor has; did you mean 'length'?"],
    ),
    (["--schedule=1f2b"], ["--schedule='1f2b': ", "1f1b"]),
    (["--num_microbatches=3"], ["num_microbatches may be 1, 2, 4"]),
    (["--boundaries=0,3"], ["--boundaries='0,3': ", "2 stages have 3 layer indices"]),
    (["--remat=FULL"], ["--remat='FULL': ", "is no policy"]),
    (["--remat=full,none,none"], ["--remat='full,none,none': ", "there are 2 stages"]),
    (["--schedule=seq1f1b:2"], ["--schedule='seq1f1b:2' ", "layers take whole sequences"]),
    (["--mesh-shape=2"], ["--mesh_shape='2': ", "is not name:size"]),
    (["--boundaries=0,a"], ["--boundaries='0,a': 'a' is no whole number"]),
    (["--boundaries=0,3,9"], ["boundaries end at 9, but there are 7 layers"]),
    (["--lowering=smd"], ["--lowering='smd'", "placement|simd"]),
    (["--lowering=simd"], ["--mesh_shape='layers:2': ", "of which the model has 5"]),
    (
        ["--lowering=simd", "--schedule=zb_v"],
        ["--schedule=zb_v: ", "runs gpipe, or"],
    ),
    (["--lowering=simd", "--remat=none"], ["--remat=none: ", "leave --remat out"]),
    (["--lowering=simd", "--layers=lingvo"], ["--layers=lingvo: ", "with named dims"]),
    (
        ["--lowering=simd", "--trace_schedule"],
        ["--trace_schedule: ", "has no actions"],
    ),
    (["--lowering=simd", "--strict_devices"], ["--strict_devices: ", "leave it out"]),
    (["--lowering=simd", "--compute_dtype=float16"], ["use --compute_dtype=bfloat16"]),
    (
        ["--lowering=simd", "--mesh_shape=layers:5", "--boundaries=0,1,2,3,4,7"],
        ["--boundaries=0,1,2,3,4,7: ", "use --boundaries=0,2,3,4,5,7"],
    ),
    (["--optimizer=adan"], ["--optimizer='adan'", "adam|adafactor|sgd|momentum"]),
    (["--dropout_prob=1"], ["--dropout_prob=1.0: it must be 0 or more, and below 1"]),
    (["--dropout_prob=-0.1"], ["--dropout_prob=-0.1", "0 or more"]),
    (["--warmup_steps=0"], ["--warmup_steps=0: it must be above 0"]),
    (["--find_learning_rate=5"], ["--find_learning_rate=5: too few to find a range"]),
    (["--learning_rate=inf"], ["--learning_rate=inf", "finite"]),
    (["--learning_rate=1e39"], ["--learning_rate=1e+39", "at most 3.4e+38"]),
    (["--batch_size=99999999999"], ["at most 2147483647"]),
    (["--seed=9223372036854775808"], ["--seed=9223372036854775808", "64 bits"]),
    (["--seed=-9223372036854775809"], ["64 bits"]),
    (["--logdir="], ["--logdir='' is empty; give a value, or leave the flag out"]),
    (["--data_dir="], ["--data_dir='' is empty"]),
    (["--data_dir=/no/such/folder"], ["--data_dir='/no/such/folder' does not exist"]),
    (["--train_pattern=*.txt"], ["--data_dir"]),
    (
        ["--mesh_shape=layers:2;model:2"],
        ["axis 'model'", "rule such as 'batch:model'", "or give --allow_idle"],
    ),
    (
        ["--mesh_shape=layers:2;data:2", "--layout=batch:dta"],
        ["'batch:dta'", "did you mean 'data'?"],
    ),
    (
        ["--mesh_shape=layers:2;data:2", "--layout=heads:data", "--layers=lingvo"],
        ["dim 'heads'", "known: 'batch'"],
    ),
    (["--layout=batch:layers"], ["'batch:layers'", "split the batch over another axis"]),
    (
        ["--mesh_shape=layers:2;data:2", "--layout=batch:data", "--num_microbatches=4"],
        [
            "--num_microbatches=4: a batch of 4 does not divide",
            "of 2 replicas; num_microbatches may be 1, 2",
        ],
    ),
    (
        ["--mesh_shape=layers:2;data:3", "--layout=batch:data"],
        ["--batch_size=4: a batch of 4 does not divide among the 3 replicas", "multiple of 6"],
    ),
    (["--num_microbatches=0"], ["--num_microbatches=0", "above 0"]),
    (["--learning_rate=nan"], ["--learning_rate=nan", "above 0"]),
    (["--save_every=0"], ["--save_every=0", "at least 1"]),
    (["--schedule=forward_only"], ["--schedule='forward_only' has no backward actions"]),
    (["--remat=some"], ["--remat='some': 'some' is no policy"]),
    (["--vocab_size=1000000"], ["--vocab_size=1000000 is too large", "at most"]),
    (["--data_dir=empty"], ["--data_dir='empty' is empty"]),
    ([*TEXTS, "--train_pattern=utf16"], ["'texts/utf16' is UTF-16; text must be UTF-8", "iconv"]),
    ([*TEXTS, "--train_pattern=mac"], ["'texts/mac' has 3 carriage returns that end no line"]),
    ([*TEXTS, "--train_pattern=bz"], ["'texts/bz' is packed by bzip2"]),
    (["--config=good.toml"], ["--mesh_shape='layers:8': ", "at most 7 stages"]),
    (
        ["--config=bad.toml"],
        ["--config='bad.toml' has 'step', which is no flag; did you mean 'steps'?"],
    ),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """The answer to each case of BAD_INPUT, of one process."""
    folder = tmp_path_factory.mktemp("refused")
    os.chdir(folder)
    for name in ("texts", "empty"):
        (folder / name).mkdir()
    for name, content in (
        ("utf16", "text\n".encode("utf-16")),
        ("mac", b"one\rtwo\rthree\r"),
        ("bz", b"BZh91AY&SY"),
        ("heldout", b"text\n"),
    ):
        (folder / "texts" / name).write_bytes(content)
    (folder / "good.toml").write_text('mesh_shape = "layers:8"\nsteps = 3\n')
    (folder / "bad.toml").write_text("step = 3\n")
    found = without_tensorflow(*(["lm", *SMALL, *flags] for flags, _ in BAD_INPUT))
    # Nothing is left that would stop the next attempt, which can use the vocabulary.
    assert not [path for path in folder.rglob("runs/*/*.*") if path.parent.name != "vocabulary"]
    return found


@pytest.mark.parametrize("number", range(len(BAD_INPUT)), ids=lambda n: " ".join(BAD_INPUT[n][0]))
def test_errors_in_flags_need_no_tensorflow(refusals, number):
    code, out, err = refusals[number]
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    for part in BAD_INPUT[number][1]:
        assert part in err


def test_ctrl_c_while_modules_are_loaded_is_one_line_and_130(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "models.one_billion_word.train", f"--logdir={tmp_path / 'run'}"],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # The vocabulary is learned when TensorFlow is to be loaded.
        end = time.monotonic() + 60
        while not list((tmp_path / "run").glob("vocabulary/vocab*.model")):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


@pytest.mark.slow
def test_the_examples_load_tensorflow_when_they_use_it():
    code = """
import sys
import models.one_billion_word.train, models.toy, models.mnist
assert not {"tensorflow", "lingvo", "keras"} & set(sys.modules)
import models.one_billion_word.params
import lingvo, tensorflow
for module in (lingvo, tensorflow):
    assert type(module.__loader__).__module__ != "models", module.__loader__
    assert module.__spec__.loader is module.__loader__
"""
    result = subprocess.run(
        [sys.executable, "-c", code], timeout=120, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
