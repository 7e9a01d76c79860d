"""Runs whose workers are lost, hang, or are slow."""

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

from pipemesh.commands.main import main
from tests.hosts.faults import STEPS, assert_same, training, until, weights
from tests.hosts.namespaces import network, why_not
from tests.hosts.workers import COMMAND, address_of, start, started
from tests.models.one_billion_word.program import SMALLER
from tests.warm import warm

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(500)]
# A client whose worker is silent from some instant on.
SILENT = """
import os, signal, sys
import tensorflow as tf
from tensorflow.python.eager import context
from pipemesh.backend.cluster import worker_devices
from pipemesh.hosts import Cluster, client
client.connect(Cluster((sys.argv[1],)), answer=1.0)
def build():
    return tf.function(lambda: tf.ones([])).get_concrete_function()
built = build()
with tf.device(worker_devices("CPU")[0][0]):
    os.kill(int(sys.argv[2]), signal.SIGSTOP)
    exec(sys.argv[3])
os._exit(0)
"""
# Of the tests with many faults.
FAULTS, LONG, MOST_STEPS = 10, 110, 10


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The log directory of a run on workers, and its events."""
    logdir = tmp_path_factory.mktemp("undisturbed") / "run"
    with started(2) as (_, addresses):
        words = [f"--cluster={','.join(addresses)}"]
        with training(logdir, *words, command=warm("-c", SMALLER)) as run:
            assert "going on" not in run.until_done()
    return logdir, run.events


def test_the_report_with_workers_is_like_any_other(undisturbed):
    logdir, events = undisturbed
    assert [event["step"] for event in events("step")] == list(range(1, STEPS + 1))
    assert [worker["is_slow"] for worker in events("workers")[-1]["workers"]] == [False] * 2
    page = (logdir / "report.html").read_text(encoding="utf-8")
    assert "layers:2" in page
    assert main(["report", str(logdir), f"--output={logdir / 'again.html'}"]) == 0
    assert (logdir / "again.html").read_text(encoding="utf-8") == page


def test_workers_that_are_killed_or_stopped_come_back_or_are_replaced(undisturbed, tmp_path):
    """A worker is killed and returns; one stops and a spare replaces it; another stops and, since
    the run is elastic, is left out until it is back. Data is read by the worker of the first stage,
    which is lost, too."""
    logdir = tmp_path / "run"
    words = ("--elastic", "--worker_wait=8", "--read_data=workers")
    with training(logdir, *words, launch=("--processes=2", "--spares=1")) as run:
        run.until_step(12)
        os.kill(run.workers()[1], signal.SIGKILL)
        run.until_told("all workers are there")
        assert re.search(r"stage 1\) is not there \(connection refused\), in \w", run.err)
        assert "going on from the last checkpoint" in run.err
        assert "it is started again" in run.err
        run.until_step(12, times=2)
        # The one that was started again has the largest number.
        first, spare, second = run.workers()
        os.kill(first, signal.SIGSTOP)
        run.until_step(17)
        err = run.err
        told = re.search(
            r"stage 0\) has not answered for \d+ s, in step \d+, begun .* ago; (.*)", err
        )
        assert told, err
        silent = re.search(r"does not answer, in (0[FB]\d) or later; going on", told[1])
        assert silent, told[1]
        # Who waits for it. Nobody does if it was stopped when the last stage had done all of the
        # step: that has used 0F1, which stands before these two.
        waits = re.search(r"^  worker 1 .*CPU:0: (in|waits to begin) 1[FB]\d", err, re.MULTILINE)
        assert waits or silent[1] in ("0B0", "0B1"), err
        assert "takes the place of worker 0" in err
        os.kill(second, signal.SIGSTOP)
        # Alone, from the checkpoint of step 16.
        run.until_told("going on without worker 1")
        run.until_steps(len(run.events("step")) + 2)
        assert re.search(r"going on without worker 1 \(.*\), which has not answered", run.err)
        assert "1 workers with 1 devices are there, and mesh=layers:2 has 2" in run.err
        assert run.events("begin")[-1]["mesh"] == "layers:1"
        again = run.err.count("all workers are there")
        for worker in (first, second):
            os.kill(worker, signal.SIGCONT)
        os.kill(spare, signal.SIGKILL)
        assert run.until_done().count("all workers are there") == again + 1
        meshes = [begin["mesh"] for begin in run.events("begin")]
        assert meshes == ["layers:2"] * 3 + ["layers:1", "layers:2"]
    assert_same(weights(logdir, 16), weights(undisturbed[0], 16))
    found, wanted = weights(logdir), weights(undisturbed[0])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def worker():
    """A worker that is no warm process, which could not be stopped, and its address."""
    worker = start(command=COMMAND)
    try:
        yield worker, address_of(worker)
    finally:
        worker.kill()
        worker.communicate()


@pytest.mark.parametrize(
    "code",
    [
        "build()",
        "context.context().remove_function(built.name)",
        "tf.constant([1.0])",
        "tf.add([1.0], 2.0)",
    ],
)
def test_a_worker_that_is_silent_during_native_code_is_noticed(worker, code):
    """TensorFlow waited for it with Python's lock held, so the watch slept as well."""
    process, address = worker
    words = warm("-c", SILENT, address, process.pid, code)
    try:
        client = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    finally:
        process.send_signal(signal.SIGCONT)
    assert client.returncode == 3, client.stderr
    assert re.search(r"^error: worker 0 \(\S+\) has not answered for \d s, in", client.stderr, re.M)


def test_one_program_resumes_when_a_worker_is_killed(undisturbed, tmp_path):
    """As one program for all devices: both workers have stage 0, and there are no actions."""
    words = ["--lowering=simd", "--mesh_shape=layers:1;data:2", "--layout=batch:data"]
    with training(tmp_path / "run", *words, steps=14) as run:
        run.until_step(10)
        os.kill(run.workers()[1], signal.SIGKILL)
        err = run.until_done()
        assert re.search(r"worker 1 \(127\.0\.0\.1:\d+, stage 0\) is .*, in .*; going on", err)
        restored = [event["restored"] for event in run.events("begin")]
        assert restored == [None, str(tmp_path / "run" / "ckpt-8")]
        resumed = {event["step"]: event["loss"] for event in run.events("step")}
    assert set(resumed) == set(range(1, 15))
    expected = {event["step"]: event["loss"] for event in undisturbed[1]("step")}
    for step, loss in resumed.items():
        np.testing.assert_allclose(loss, expected[step], rtol=1e-4)


@pytest.mark.exhaustive
def test_a_slow_worker_is_named(tmp_path):
    with training(tmp_path / "run", steps=16, save_every=16) as run:
        run.until_step(2)
        slow, ended = run.workers()[1], threading.Event()

        def hinder():
            # It runs for a fifth of the time.
            while not ended.wait(0.01):
                os.kill(slow, signal.SIGSTOP)
                time.sleep(0.04)
                os.kill(slow, signal.SIGCONT)

        thread = threading.Thread(target=hinder)
        thread.start()
        try:
            until(lambda: run.events("workers"), 200)
        finally:
            ended.set()
            thread.join()
        err = run.until_done()
    assert re.search(r"worker 1 \(.*, stage 1\) is slow: it takes \d+\.\d times as long", err)
    assert "Slow: worker 1" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


@contextlib.contextmanager
def on_two_hosts(logdir, *words, **keywords):
    """A training whose client and workers have each a host of their own."""
    if why := why_not():
        pytest.skip(f"this needs hosts of their own: {why}")
    with network(2) as there, contextlib.ExitStack() as stack:
        workers = []
        for host in (1, 2):
            command = there.warm(host, "-m", "pipemesh", "worker")
            worker = start(f"--listen={there.address(host)}", command=command)
            stack.callback(worker.communicate)
            stack.callback(worker.kill)
            workers.append(worker)
        addresses = ",".join(map(address_of, workers))
        run = training(
            logdir,
            f"--cluster={addresses}",
            *words,
            command=there.warm(0, "-c", SMALLER),
            **keywords,
        )
        yield there, stack.enter_context(run)


def test_cut_connections_are_named_and_the_run_resumes(undisturbed, tmp_path):
    with on_two_hosts(tmp_path / "run", "--step_limit=4") as (there, run):
        run.until_step(12)
        there.part(1, 2)
        run.until_told("and all workers answer")
        there.rejoin(1, 2)
        # It may have waited for too long by then.
        done = len(run.events("step"))
        run.until_steps(done + 2)
        told = run.err[run.err.index("and all workers answer") :]
        assert re.search(
            r"worker [01] \(.*stage [01]\) CPU:0: waits to begin [01][FB]\d, for", told
        )
        again = run.err.count("going on from the last checkpoint")
        there.cut(2)
        begun = time.monotonic()
        run.until_told("going on from the last checkpoint", again + 1)
        assert time.monotonic() - begun < 15
        there.mend(2)
        err = run.until_done()
    assert re.search(r"worker 1 \(10\.77\.0\.3:\d+, stage 1\) has not answered for \d+ s", err)
    assert_same(weights(tmp_path / "run"), weights(undisturbed[0]))


@pytest.fixture(scope="module")
def long_undisturbed(tmp_path_factory):
    logdir = tmp_path_factory.mktemp("long") / "run"
    with training(logdir, steps=LONG, save_every=4) as run:
        run.until_done()
    return weights(logdir, LONG)


def disturb_often(run, seed, strike):
    """Lets something happen at random instants, of steps and of what is before the first."""
    chance, kept = random.Random(seed), 0
    for number in range(FAULTS):
        if number and chance.random() < 0.3:
            time.sleep(chance.uniform(0.0, 8.0))
        else:
            run.until_steps(len(run.events("step")) + chance.randint(1, MOST_STEPS))
            time.sleep(chance.uniform(0.0, 0.3))
        kept, before = run.checkpoint(), kept
        assert kept >= before
        strike(chance, number + 1)
    assert run.checkpoint() >= kept


def kill(run, chance, number):
    os.kill(chance.choice(run.workers()), signal.SIGKILL)
    run.until_told("it is started again", number)


def stop(run, chance, number):
    worker = chance.choice(run.workers())
    os.kill(worker, signal.SIGSTOP)
    time.sleep(chance.uniform(6.5, 10.0))
    os.kill(worker, signal.SIGCONT)


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("seed", "fault"), [(1, kill), (2, stop)])
def test_faults_at_random_instants_change_nothing(long_undisturbed, tmp_path, seed, fault):
    with training(tmp_path / "run", steps=LONG, save_every=4) as run:
        disturb_often(run, seed, functools.partial(fault, run))
        run.until_done(400)
    assert_same(weights(tmp_path / "run", LONG), long_undisturbed)


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_cut_connections_at_random_instants_change_nothing(long_undisturbed, tmp_path):
    with on_two_hosts(tmp_path / "run", steps=LONG, save_every=4) as (there, run):

        def cut(chance, number):
            host = chance.choice([1, 2])
            there.cut(host)
            time.sleep(chance.uniform(6.5, 10.0))
            there.mend(host)

        disturb_often(run, 3, cut)
        run.until_done(400)
    assert_same(weights(tmp_path / "run", LONG), long_undisturbed)
