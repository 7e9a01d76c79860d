"""Help, errors and Ctrl-C: answered without TensorFlow, in one line or on one page."""

import os
import signal
import subprocess
import sys
import time

from tests.commands.program import without_tensorflow
from tests.models.one_billion_word.program import SMALL
from tests.warm import warm


def test_help_needs_no_tensorflow_and_is_no_failure():
    for code, out, err in without_tensorflow(["lm", "--help", "--no_such_flag"], ["lm", "-h"]):
        assert (code, err) == (0, "")
        assert out.startswith("usage: lm [--flag=value ...]\n\nTrains the one-billion-word")
        for name in ("--mesh_shape", "--num_microbatches", "--[no]other_text", "--freeze"):
            assert name in out


TEXTS = ["--heldout_pattern=heldout", "--data_dir=texts"]
BAD_INPUT = [
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
    (["--num_microbatches=3"], ["num_microbatches may be 1, 2, 4"]),
    (
        ["--tokens_per_microbatch=64", "--num_microbatches=2"],
        ["--tokens_per_microbatch=64: --num_microbatches=2 sets it; leave one out"],
    ),
    (["--schedule=decode"], ["--schedule='decode' has no backward actions"]),
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
    (["--lowering=simd", "--compile"], ["--compile: ", "leave it out"]),
    (["--plain", "--compile"], ["--plain has no pipeline, for which --compile is"]),
    (["--lowering=simd", "--compute_dtype=float16"], ["use --compute_dtype=bfloat16"]),
    (
        ["--lowering=simd", "--mesh_shape=layers:5", "--boundaries=0,1,2,3,4,7"],
        ["--boundaries=0,1,2,3,4,7: ", "use --boundaries=0,2,3,4,5,7"],
    ),
    (["--dropout_prob=1"], ["--dropout_prob=1.0: it must be 0 or more, and below 1"]),
    (["--dropout_prob=-0.1"], ["--dropout_prob=-0.1", "0 or more"]),
    (["--warmup_steps=0"], ["--warmup_steps=0: it must be above 0"]),
    (
        ["--learning_rate_schedule=linear", "--steps=50", "--learning_rate=0.01"],
        ["--decay_steps=50: the fall would begin at step 100, after --warmup_steps=100"],
    ),
    (["--learning_rate_schedule=wsd"], ["0.4, is a factor of its own schedule; give --learning_r"]),
    (["--find_learning_rate=5"], ["--find_learning_rate=5: too few to find a range"]),
    (["--learning_rate=nan"], ["--learning_rate=nan", "above 0"]),
    (["--learning_rate=1e39"], ["--learning_rate=1e+39", "at most 3.4e+38"]),
    (["--batch_size=99999999999"], ["at most 2147483647"]),
    (["--seed=9223372036854775808"], ["--seed=9223372036854775808", "64 bits"]),
    (["--save_every=0"], ["--save_every=0", "at least 1"]),
    (["--logdir="], ["--logdir='' is empty; give a value, or leave the flag out"]),
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
    (["--vocab_size=1000000"], ["--vocab_size=1000000 is too large", "at most"]),
    ([*TEXTS, "--train_pattern=mac"], ["'texts/mac' has 3 carriage returns that end no line"]),
    (["--config=good.toml"], ["--mesh_shape='layers:8': ", "at most 7 stages"]),
]


def test_errors_in_flags_need_no_tensorflow(tmp_path):
    os.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "mac").write_bytes(b"one\rtwo\rthree\r")
    (tmp_path / "texts" / "heldout").write_bytes(b"text\n")
    (tmp_path / "good.toml").write_text('mesh_shape = "layers:8"\nsteps = 3\n')
    answers = without_tensorflow(*(["lm", *SMALL, *flags] for flags, _ in BAD_INPUT))
    for (flags, parts), (code, out, err) in zip(BAD_INPUT, answers, strict=True):
        assert (code, out, err.count("\n")) == (2, "", 1), (flags, err)
        assert err.startswith("error: ") and all(part in err for part in parts), (flags, err)
    # Nothing is left that would stop the next attempt, which can use the vocabulary.
    left = [path for path in tmp_path.rglob("runs/*/*.*") if path.parent.name != "vocabulary"]
    assert not left


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


def test_the_examples_load_tensorflow_when_they_use_it():
    without = """
import sys
import models.one_billion_word.train, models.toy, models.mnist
assert not {"tensorflow", "lingvo", "keras"} & set(sys.modules)
"""
    # What loads them then leaves them as if Python had.
    loaded = """
import lingvo, tensorflow
for module in (lingvo, tensorflow):
    assert type(module.__loader__).__module__ != "models", module.__loader__
    assert module.__spec__.loader is module.__loader__
"""
    for command in ([sys.executable, "-c", without], warm("-c", loaded)):
        result = subprocess.run(command, timeout=120, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, "")
