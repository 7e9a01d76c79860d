"""Help, errors and Ctrl-C: answered without TensorFlow, in one line or on one page."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.models.one_billion_word.program import finish, refused, start_cold

# Runs the program where TensorFlow cannot be loaded.
WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = sys.modules["lingvo"] = None
from models.one_billion_word import train
from pipemesh.commands import process
process.run(lambda argv: train.main(["train", *argv[1:]]))
"""


def without_tensorflow(*flags):
    return finish(start_cold(*flags, code=WITHOUT_TENSORFLOW))


@pytest.mark.parametrize("flag", ["--help", "-h", "-help", "--helpfull", "--helpshort"])
def test_help_needs_no_tensorflow_and_is_no_failure(flag):
    code, out, err = without_tensorflow(flag, "--no_such_flag")
    assert (code, err) == (0, "")
    assert out.startswith("usage: train [--flag=value ...]\n\nTrains the one-billion-word")
    for name in ("--mesh_shape", "--num_microbatches", "--[no]other_text", "--eval_batches"):
        assert name in out


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
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
        (["--schedule=seq1f1b:2"], ["--schedule='seq1f1b:2': ", "layers take whole sequences"]),
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
    ],
)
def test_errors_in_flags_need_no_tensorflow(flags, parts):
    code, out, err = without_tensorflow(*flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    for part in parts:
        assert part in err


def test_a_vocabulary_that_cannot_be_learned_needs_no_tensorflow(tmp_path):
    code, _, err = without_tensorflow(f"--logdir={tmp_path}", "--vocab_size=1000000")
    assert code == 2
    assert "--vocab_size=1000000 is too large" in err


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("text\n".encode("utf-16"), "is UTF-16; text must be UTF-8. Convert it: iconv"),
        (b"one\rtwo\rthree\r", "3 carriage returns that end no line"),
        (b"BZh91AY&SY", "is packed by bzip2"),
    ],
)
def test_text_of_another_kind_is_named(tmp_path, content, part):
    (tmp_path / "train").write_bytes(content)
    (tmp_path / "heldout").write_text("text\n")
    patterns = ["--train_pattern=train", "--heldout_pattern=heldout"]
    line = refused(f"--data_dir={tmp_path}", f"--logdir={tmp_path / 'run'}", *patterns)
    assert f"{str(tmp_path / 'train')!r} " in line and part in line


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


def test_flags_come_from_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('mesh_shape = "layers:8"\nsteps = 3\n')
    code, _, err = without_tensorflow(f"--config={path}")
    assert code == 2 and "--mesh_shape='layers:8': " in err and "at most 7 stages" in err
    path.write_text("step = 3\n")
    code, _, err = without_tensorflow(f"--config={path}")
    assert (code, err) == (
        2,
        f"error: --config={str(path)!r} has 'step', which is no flag; did you mean 'steps'?"
        + err.partition("did you mean 'steps'?")[2],
    )
