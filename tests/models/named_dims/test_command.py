"""The programs as users start them: what they print, write and refuse."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

MNIST, TOY = "models.mnist.train", "models.toy.train"
BOTH = ["--mesh_shape=data:2;model:2", "--layout=batch:data;hidden:model"]

BAD_INPUT = [
    ([MNIST, "--mesh_shape=data"], "--mesh_shape='data'", "'data' in mesh", "'layers:2'"),
    ([MNIST, "--mesh_shape=data:2;data:2"], "--mesh_shape", "'data' is named twice"),
    ([MNIST, "--mesh_shape=data:0"], "--mesh_shape", "size 0"),
    ([MNIST, "--mesh_shape=data:65"], "--mesh_shape='data:65' needs 65 CPUs", "at most 64"),
    ([MNIST, "--device_type=GPU"], "needs 2 GPUs, but 0 exist", "--device_type=CPU"),
    ([MNIST, "--device_type=TPU"], "--device_type", "CPU|GPU"),
    ([MNIST, "--layout=batch"], "--layout='batch'", "'batch:data'"),
    ([MNIST, "--layout=batch:dat"], "--layout='batch:dat'", "did you mean 'data'?"),
    ([MNIST, "--layout=row:data"], "dim 'row'", "did you mean 'rows'?", "'classes'"),
    ([MNIST, "--layout=batch:data;batch:model", BOTH[0]], "--layout", "a dim has one axis"),
    ([MNIST, "--layout=batch:data;hidden:data"], "--layout", "'batch' and 'hidden'"),
    (
        [MNIST, "--mesh_shape=data:3"],
        "size 128",
        "axis 'data' of mesh 'data:3' cannot cut into 3",
        "--batch_size is the size of 'batch'",
    ),
    ([MNIST, "--mesh_shape=a:4", "--layout=classes:a"], "size 10", "'classes:a'"),
    ([MNIST, "--lowering=tpu"], "--lowering='tpu'", "placement|simd"),
    ([MNIST, "--batch_size=0"], "--batch_size=0", "at least 1"),
    ([MNIST, "--learning_rate=nan"], "--learning_rate=nan", "above 0"),
    ([MNIST, "--epochs=-1"], "--epochs=-1", "above 0"),
    ([MNIST, "--epochs=1", "--steps=1"], "--steps=1 and --epochs=1.0", "one of them"),
    ([MNIST, "--curve=/no/such/folder/x"], "--curve='/no/such/folder/x'", "No such file"),
    ([MNIST, "--layuot=x"], "unknown flag --layuot", "--layout?"),
    ([MNIST, "trash"], "'trash' is no flag"),
    ([TOY, "--mesh_shape=data:3", "--layout=io:data"], "size 32", "--io_size is the size of 'io'"),
    ([TOY, "--layout=rows:data"], "dim 'rows'", "'batch', 'io', 'hidden'"),
    ([TOY, "--activation=gelu"], "--activation='gelu'", "none|relu"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("curves")


@pytest.fixture(scope="module")
def good(folder):
    """Command lines by name."""
    mnist = [MNIST, "--steps=3", "--batch_size=100", "--hidden_size=64"]
    toy = [TOY, "--steps=3", "--eval_every=2"]
    return {
        "mnist": [*mnist, f"--curve={folder / 'mnist'}"],
        "mnist simd": [*mnist, *BOTH, "--lowering=simd", f"--curve={folder / 'mnist simd'}"],
        "toy": [*toy, *BOTH, "--layout=hidden:model", f"--curve={folder / 'toy'}"],
        "toy diverges": [*toy, "--learning_rate=1e30"],
    }


@pytest.fixture(scope="module")
def results(good):
    """Exit code, stdout and stderr of all command lines."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.named_dims.commands"],
        input=json.dumps([*good.values(), *(case[0] for case in BAD_INPUT)]),
        capture_output=True,
        text=True,
        # As from a shell, not with the log level of the tests.
        env={k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"},
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(
        zip([*good, *range(len(BAD_INPUT))], map(json.loads, done.stdout.splitlines()), strict=True)
    )


def read_curve(path):
    steps, losses = np.loadtxt(path, delimiter=",", skiprows=1, unpack=True)
    assert steps.tolist() == [1, 2, 3]
    return losses


@pytest.mark.slow
def test_mnist_prints_its_plan_and_learns_the_same_under_another_one(results, folder):
    code, out, err = results["mnist"]
    assert code == 0, err
    assert "mesh data:2, layout 'batch:data', placement on 2 x CPU" in out
    assert "w1      rows:28;cols:28;hidden:64      50,176    50,176" in out
    assert "203,264" in out
    assert "step 0: held-out accuracy " in out
    assert "step 3: loss " in out and "%" in out
    code, out, err = results["mnist simd"]
    assert code == 0, err
    assert "w1      rows:28;cols:28;hidden:64/model      50,176    25,088" in out
    assert "model  all_reduce  forward" in out
    curve = read_curve(folder / "mnist")
    np.testing.assert_allclose(read_curve(folder / "mnist simd"), curve, rtol=1e-5)
    assert curve[-1] < curve[0]


def test_toy_tells_of_an_axis_that_is_not_used(results, folder):
    code, out, err = results["toy"]
    assert code == 0, err
    assert "no rule splits over axis 'data': the 2 devices along it compute the same" in out
    assert "step 2: loss " in out and "step 3: loss " in out
    curve = read_curve(folder / "toy")
    assert curve[-1] < curve[0]


def refusal(result):
    """The one line that says why."""
    code, _, err = result
    assert code == 2, err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return line


def test_a_loss_that_is_no_number_ends_training(results):
    assert "--learning_rate=1e+30: the loss is " in refusal(results["toy diverges"])


@pytest.mark.parametrize("number", range(len(BAD_INPUT)))
def test_bad_input_is_told_in_one_line(results, number):
    assert results[number][2].count("\n") == 1, results[number][2]
    for part in BAD_INPUT[number][1:]:
        assert part in refusal(results[number])
