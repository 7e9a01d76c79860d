"""The programs as users start them: what they print, write and refuse."""

import re
import subprocess
import sys

import numpy as np
import pytest

from models.mnist import train as mnist
from models.named_dims import command
from models.toy import train as toy
from models.unet import train as unet
from tests.warm import warm

BOTH = ["--mesh_shape=data:2;model:2", "--layout=batch:data;hidden:model"]
FEW = ["--steps=3", "--batch_size=100", "--hidden_size=64"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a program in this process, whose devices exist; returns exit code, stdout and stderr."""
    monkeypatch.setattr(command, "start_devices", lambda mesh, kind: None)

    def run(module, *flags):
        monkeypatch.setattr(sys, "argv", ["program", *flags])
        with pytest.raises(SystemExit) as end:
            command.run(module.train, module.__doc__, module.TRAIN_FLAGS)
        return end.value.code, *capsys.readouterr()

    return run


def read_curve(path):
    steps, losses = np.loadtxt(path, delimiter=",", skiprows=1, unpack=True)
    assert steps.tolist() == [1, 2, 3]
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.slow
def test_mnist_prints_its_plan_and_learns_the_same_under_another_one(run, tmp_path):
    curves = [tmp_path / "placement", tmp_path / "simd"]
    code, out, err = run(mnist, *FEW, f"--curve={curves[0]}")
    assert code == 0, err
    assert "mesh data:2, layout 'batch:data', placement on 2 x CPU" in out
    assert "w1      rows:28;cols:28;hidden:64      50,176    50,176" in out
    assert "203,264" in out
    assert "step 0: held-out accuracy " in out
    assert "step 3: loss " in out and "%" in out
    code, out, err = run(mnist, *FEW, *BOTH, "--lowering=simd", f"--curve={curves[1]}")
    assert code == 0, err
    assert "w1      rows:28;cols:28;hidden:64/model      50,176    25,088" in out
    assert "model  all_reduce  forward" in out
    np.testing.assert_allclose(*map(read_curve, curves), rtol=1e-5)


def test_unet_prints_the_dice_score_of_split_volumes(run):
    small = ["--batch_size=2", "--side=4", "--levels=1", "--hidden_size=1", "--steps=1"]
    code, out, err = run(unet, *small, "--mesh_shape=y:2", "--layout=rows:y")
    assert code == 0, err
    assert re.search(r"step 1: loss .*, held-out Dice score sphere 0.\d+, tube 0.\d+", out)
    assert re.search("y +permute +backward", out)


def test_toy_tells_of_an_axis_that_is_not_used(tmp_path):
    words = ["--steps=3", "--eval_every=2", BOTH[0], "--layout=hidden:model"]
    words = warm("-m", toy.__name__, *words, f"--curve={tmp_path / 'toy'}")
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no rule splits over axis 'data': the 2 devices along it compute the same" in done.stdout
    assert "step 2: loss " in done.stdout and "step 3: loss " in done.stdout
    read_curve(tmp_path / "toy")


@pytest.mark.parametrize(
    ("module", "flags", "parts"),
    [
        (mnist, ["--mesh_shape=data"], ["--mesh_shape='data'", "'data' in mesh", "'layers:2'"]),
        (mnist, ["--device_type=TPU"], ["--device_type", "CPU|GPU"]),
        (mnist, ["--layout=batch"], ["--layout='batch'", "'batch:data'"]),
        (mnist, ["--layout=row:data"], ["dim 'row'", "did you mean 'rows'?", "'classes'"]),
        (mnist, ["--layout=batch:data;hidden:data"], ["--layout", "'batch' and 'hidden'"]),
        (
            mnist,
            ["--mesh_shape=data:3"],
            [
                "size 128",
                "axis 'data' of mesh 'data:3' cannot cut into 3",
                "--batch_size is the size of 'batch'",
            ],
        ),
        (unet, ["--side=6", "--levels=2"], ["--side=6", "a multiple of 4"]),
        (
            unet,
            ["--mesh_shape=y:8", "--layout=rows:y"],
            ["size 4", "--side, halved by each of --levels, is the size of 'rows'"],
        ),
        (mnist, ["--lowering=tpu"], ["--lowering='tpu'", "placement|simd"]),
        (mnist, ["--batch_size=0"], ["--batch_size=0", "at least 1"]),
        (mnist, ["--learning_rate=nan"], ["--learning_rate=nan", "above 0"]),
        (mnist, ["--epochs=-1"], ["--epochs=-1", "above 0"]),
        (mnist, ["--epochs=1", "--steps=1"], ["--steps=1 and --epochs=1.0", "one of them"]),
        (mnist, ["--curve=/no/such/folder/x"], ["--curve='/no/such/folder/x'", "No such file"]),
        (mnist, ["--layuot=x"], ["unknown flag --layuot", "--layout?"]),
        (
            toy,
            ["--mesh_shape=data:3", "--layout=io:data"],
            ["size 32", "--io_size is the size of 'io'"],
        ),
        (toy, ["--layout=rows:data"], ["dim 'rows'", "'batch', 'io', 'hidden'"]),
        (toy, ["--activation=gelu"], ["--activation='gelu'", "none|relu"]),
        (toy, ["--learning_rate=1e30"], ["--learning_rate=1e+30: the loss is "]),
    ],
)
def test_bad_input_is_told_in_one_line(run, module, flags, parts):
    code, _, err = run(module, *flags)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    for part in parts:
        assert part in err
