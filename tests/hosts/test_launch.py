"""The command `pipemesh launch`, and what becomes of a training when a worker is lost."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from pipemesh.cli import main

LAUNCH = [sys.executable, "-m", "pipemesh.cli", "launch"]
TRAIN = [sys.executable, "-m", "models.one_billion_word.train"]
# Small enough for a step to take a fraction of a second.
FLAGS = [
    *("--mesh_shape=layers:2", "--num_microbatches=4", "--batch_size=8", "--sequence_length=32"),
    *(
        "--steps=24",
        "--save_every=8",
        "--eval_every=100",
        "--log_format=json",
        "--dropout_prob=0.1",
    ),
    "--worker_answer=3",
]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--processes=0", "--", "true"], "--processes=0: it must be at least 1"),
        (["--processes=1", "--spares=-1", "--", "true"], "--spares=-1: it must be at least 0"),
        (["--processes=1"], "which command? write it behind --"),
        (["--processes=1", "--spares=1", "--", "x", "--lowering=simd"], "has no workers"),
    ],
)
def test_what_cannot_be_launched_is_an_error(words, told, capsys):
    assert main(["launch", *words]) == 2
    assert told in capsys.readouterr().err


def children(pid):
    """The workers that a process has started, in their order."""
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    found = []
    for child in map(int, text.split()):
        with contextlib.suppress(OSError):
            words = pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
            if b"worker" in words.split(b"\0"):
                found.append(child)
    return sorted(found)


def is_there(pid):
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


@contextlib.contextmanager
def launched(*words):
    process = subprocess.Popen(
        [*LAUNCH, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(is_so, seconds):
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit, f"not within {seconds} s"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_output_and_exit_code_are_passed_on_and_nothing_is_left():
    code = (
        "import json, os, sys; print(os.environ['TF_CONFIG']); print('said', file=sys.stderr); "
        "sys.exit(7)"
    )
    with launched("--processes=2", "--spares=1", "--", sys.executable, "-c", code) as process:
        until(lambda: len(children(process.pid)) == 3, 30)
        workers = children(process.pid)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 7
    cluster = json.loads(out)["cluster"]
    assert len({*cluster["worker"], *cluster["spare"]}) == 3
    assert "said" in err
    assert not any(map(is_there, workers))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_workers_and_command_end_with_it_even_if_it_is_killed():
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with launched("--processes=1", "--", sys.executable, "-c", code) as process:
        pids = [int(process.stdout.readline()), *children(process.pid)]
        assert len(pids) == 2
        # Who is stopped sees nothing end.
        os.kill(pids[1], signal.SIGSTOP)
        process.kill()
        until(lambda: not any(map(is_there, pids)), 20)


def train(logdir, *words, disturb=None):
    """Trains on two workers; `disturb` gets their processes in the middle of it."""
    path = str(logdir)
    told = logdir.parent / f"{logdir.name}.json"
    with (
        open(told, "w", encoding="utf-8") as out,
        subprocess.Popen(
            [*LAUNCH, "--processes=2", *words, "--", *TRAIN, *FLAGS, f"--logdir={path}"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            if disturb:
                until(lambda: '"step": 12,' in told.read_text(encoding="utf-8"), 150)
                disturb(children(process.pid))
            _, err = process.communicate(timeout=200)
        finally:
            process.kill()
    assert process.returncode == 0, err[-3000:]
    return err


def weights(logdir):
    reader = tf.train.load_checkpoint(os.path.join(logdir, "ckpt-24"))
    names = [name for name in reader.get_variable_to_shape_map() if "data" not in name]
    return {name: reader.get_tensor(name) for name in names if not name.startswith("_")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    logdir = tmp_path_factory.mktemp("undisturbed") / "run"
    err = train(logdir)
    assert "going on" not in err
    return weights(logdir)


def assert_same(found, wanted):
    assert len(wanted) > 50
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] == value).all(), name


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(500)
def test_a_worker_that_is_killed_costs_some_steps_and_changes_nothing(undisturbed, tmp_path):
    err = train(tmp_path / "run", disturb=lambda workers: os.kill(workers[1], signal.SIGKILL))
    assert "stage 1) is not there (connection refused), in " in err
    assert "going on from the last checkpoint" in err
    assert "it is started again" in err
    assert_same(weights(tmp_path / "run"), undisturbed)


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(500)
def test_a_spare_takes_the_place_of_a_worker_that_is_stopped(undisturbed, tmp_path):
    err = train(
        tmp_path / "run",
        "--spares=1",
        disturb=lambda workers: os.kill(workers[0], signal.SIGSTOP),
    )
    assert "stage 0) has not answered for 3 s, in " in err
    assert "takes the place of worker 0" in err
    assert_same(weights(tmp_path / "run"), undisturbed)
