"""What becomes of several processes that train together when one of them is lost for good."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import tensorflow as tf

from tests.hosts.faults import LAUNCH, Written, until
from tests.hosts.test_together import children
from tests.lowering.hosts_process import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(600)]
# When the first loss is to come, when the second one, and how far two processes get in any case.
STEPS, FIRST, SECOND, BOTH = 16, 5, 9, 8
COMMAND = [
    *(sys.executable, "-m", "models.one_billion_word.train", "--mesh_shape=layers:1;data:2"),
    *("--layout=batch:data", "--lowering=simd", "--num_microbatches=2", "--dropout_prob=0.1"),
    *("--batch_size=4", "--sequence_length=16", "--vocab_size=512", "--eval_every=1000"),
    *("--eval_batches=1", "--log_format=json", "--max_to_keep=10", "--worker_answer=3"),
    *("--worker_wait=4", "--save_every=4", f"--steps={STEPS}"),
]


class Run(Written):
    """A process of a training, or a launcher of several."""

    def __init__(self, path, *words):
        super().__init__(path.with_suffix(".out"), path.with_suffix(".err"))
        with open(self._out, "ab") as out, open(self._err, "ab") as err:
            self.process = subprocess.Popen(words, stdout=out, stderr=err)

    def until(self, is_so, seconds=150):
        def is_so_yet():
            assert self.process.poll() is None, self.err[-3000:]
            return is_so()

        until(is_so_yet, seconds)

    def until_step(self, step):
        """Waits until a step was finished."""
        self.until(lambda: any(each["step"] >= step for each in self.events("step")))

    def until_done(self, seconds=200):
        assert self.process.wait(seconds) == 0, self.err[-3000:]
        return self.err

    def end(self):
        """Kills it for good."""
        self.process.kill()
        self.process.wait()

    def losses(self):
        return {each["step"]: each["loss"] for each in self.events("step")}


@pytest.fixture
def started(tmp_path):
    """Starts a process, or a launcher, whose output is kept by a name."""
    begun = []

    def start(name, *words):
        begun.append(Run(tmp_path / name, *words))
        return begun[-1]

    yield start
    for run in begun:
        with contextlib.suppress(OSError):
            for pid in children(run.process.pid).values():
                os.kill(pid, signal.SIGKILL)
        run.process.kill()
        run.process.wait()


def weights(path):
    """All that a checkpoint has of a model and its optimizer."""
    reader = tf.train.load_checkpoint(str(path))
    names = [name for name in reader.get_variable_to_shape_map() if "data" not in name]
    return {name: reader.get_tensor(name) for name in names if not name.startswith("_")}


def copy(folder, to):
    """What a log directory has but who takes part, for a training of others."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("processes-*"))


def test_a_spare_takes_over_from_the_first_process_then_one_goes_on_alone_and_one_comes_too_late(
    started, tmp_path
):
    """The first process and then the spare that took its place are killed for good."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    folder = tmp_path / "run"
    words = [*COMMAND, f"--cluster={','.join(addresses[:2])}", f"--spares={addresses[2]}"]

    def begin(name, number):
        return started(name, *words, f"--process={number}", f"--logdir={folder}", "--elastic")

    first, second, spare = (begin(name, i) for i, name in enumerate(["first", "second", "spare"]))
    first.until_step(FIRST)
    assert f"spare {addresses[2]} waits until a process is lost" in spare.err
    first.end()
    spare.until_step(SECOND)
    spare.end()
    # Nobody writes there now.
    copy(folder, tmp_path / "left")
    second.until_step(SECOND)
    late = begin("late", 0)
    err = second.until_done()
    told = late.until_done(30)

    lost = rf"process 0 \({addresses[0]}, stage 0\) is .*, in .*; going on from"
    assert re.search(lost, err)
    taken = f"spare {addresses[2]} takes the place of process 0 ({addresses[0]})"
    assert taken in spare.err
    assert f"spare {addresses[2]} has the log directory from now on" in spare.err
    assert [begun["mesh"] for begun in spare.events("begin")] == ["layers:1;data:2"]
    assert f"going on without process 0 ({addresses[0]})" in err
    assert f"process 1 ({addresses[1]}) has the log directory from now on" in err
    assert (
        "elastic: 1 of 2 processes take part, and mesh=layers:1;data:2 has 2: this time "
        "mesh=layers:1;data:1"
    ) in err
    assert f"process 0 ({addresses[0]}) comes too late: process 1 ({addresses[1]})" in told
    assert f"the training has ended, and process 0 ({addresses[0]}) with it" in told
    assert [begun["mesh"] for begun in second.events("begin")] == ["layers:1;data:1"]

    # Undisturbed as far as two trained: bit for bit.
    launch = [*LAUNCH, "--processes=2", "--", *COMMAND, f"--steps={BOTH}"]
    two = started("two", *launch, f"--logdir={tmp_path / 'two'}")
    two.until_done()
    assert set(two.losses()) == set(range(1, BOTH + 1))
    found = first.losses() | spare.losses()
    assert {step: found[step] for step in two.losses()} == two.losses()
    wanted, left = (weights(tmp_path / name / f"ckpt-{BOTH}") for name in ("two", "left"))
    assert len(wanted) > 50
    assert left.keys() == wanted.keys()
    assert all((left[name] == value).all() for name, value in wanted.items())

    # One process that goes on from the same checkpoint under the smaller mesh: bit for bit, too.
    smaller = ["--mesh_shape=layers:1;data:1", "--cluster=none", f"--logdir={tmp_path / 'left'}"]
    alone = started("alone", *COMMAND, *smaller)
    alone.until_done()
    restored = [each.events("begin")[0]["restored"] for each in (alone, second)]
    assert len({os.path.basename(path) for path in restored}) == 1
    assert STEPS in alone.losses()
    assert second.losses() == alone.losses()


@pytest.mark.exhaustive
def test_of_a_launcher_a_spare_takes_over_from_one_that_is_stopped(started, tmp_path):
    """It has the log directory still, and learns when it goes on that others have begun again."""
    launch = [*LAUNCH, "--processes=2", "--spares=1", "--", *COMMAND]
    run = started("run", *launch, f"--logdir={tmp_path / 'run'}")
    run.until_step(FIRST)
    stopped = children(run.process.pid)[0]
    os.kill(stopped, signal.SIGSTOP)
    run.until(lambda: "takes the place of process 0" in run.err)
    run.until_step(SECOND)
    os.kill(stopped, signal.SIGCONT)
    err = run.until_done()
    assert re.search(r"process 0 \(.*\) has not answered for \d+ s, in \w", err)
    assert re.search(r"process 0 \(.*\) comes too late: spare .* and process 1 \(.*\) went on", err)
    assert "the training has ended, and process 0" in err
    wanted = started("wanted", *launch, f"--logdir={tmp_path / 'wanted'}")
    wanted.until_done()
    assert wanted.losses() == run.losses()
    found, wanted = (weights(tmp_path / name / f"ckpt-{STEPS}") for name in ("run", "wanted"))
    assert all((found[name] == value).all() for name, value in wanted.items())


@pytest.mark.exhaustive
def test_of_four_processes_of_which_two_are_lost_at_once_two_go_on(started, tmp_path):
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(4))
    folder = tmp_path / "run"
    words = [f"--cluster={addresses}", "--mesh_shape=layers:1;data:4", "--num_microbatches=1"]
    words += ["--elastic", f"--logdir={folder}"]
    every = [started(str(i), *COMMAND, *words, f"--process={i}") for i in range(4)]
    every[0].until_step(FIRST)
    for index in (0, 2):
        every[index].process.kill()
    for index in (0, 2):
        every[index].process.wait()
    copy(folder, tmp_path / "left")
    err = every[1].until_done()
    assert every[3].until_done(30).count("going on from the last checkpoint") == 1
    assert "going on without process 0 (" in err and " and process 2 (" in err
    assert "this time mesh=layers:1;data:2" in err
    launch = [*LAUNCH, "--processes=2", "--", *COMMAND, *words[1:3]]
    launch += ["--mesh_shape=layers:1;data:2", f"--logdir={tmp_path / 'left'}"]
    wanted = started("wanted", *launch)
    wanted.until_done()
    assert every[1].losses() == wanted.losses()
