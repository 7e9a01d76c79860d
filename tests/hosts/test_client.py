"""A client that waits for workers, and that restarts or ends, whatever holds it back."""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest
import tensorflow as tf

from pipemesh.errors import DeviceError
from pipemesh.hosts import Cluster, client
from tests.hosts.faults import until
from tests.hosts.test_watch import SILENT, WELL, Answers

# A program whose only worker is lost.
PROGRAM = """
import os, sys, time
from pipemesh.hosts import client, watch
if client.has_begun_again():
    open(sys.argv[1], "w").close()
    os._exit(0)
watched = watch.Watch({0: "127.0.0.1:9"}, [7], 0.3, client.begin_again)
watch.make_current(watched)
watched.start()
time.sleep(20)
"""
STANDARD_ERRORS = ["2>/dev/full", "2>&-", "2>&1 | true", "2>&1 | sleep 99"]
# Of the last one, a pipe that is full and that nobody reads.
FILL = "import os, select\nwhile select.select([], [2], [], 0)[1]: os.write(2, bytes(4096))"


@pytest.mark.slow
def test_a_lost_worker_is_noticed_without_standard_error(tmp_path):
    """The thread that watches died of an error of its own line, and the client waited for ever."""
    started = []
    for number, redirection in enumerate(STANDARD_ERRORS):
        fill = FILL if "sleep" in redirection else ""
        command = f'exec "$0" -c "$1" {tmp_path / str(number)} {redirection}'
        words = ["sh", "-c", command, sys.executable, f"{fill}{PROGRAM}"]
        started.append(subprocess.Popen(words, start_new_session=True))
    try:
        until(lambda: len(os.listdir(tmp_path)) == len(STANDARD_ERRORS), 60)
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_restart_leaves_no_temporary_files():
    def doubled(x):
        return x * 2 if x > 1 else x

    tf.autograph.to_graph(doubled)
    prefix = "__autograph_generated_file"
    written = [
        str(module.__file__) for name, module in sys.modules.items() if name.startswith(prefix)
    ]
    assert any(map(os.path.exists, written))
    client._leave()
    assert not any(map(os.path.exists, written))


def gathered(monkeypatch, *rounds, seconds=5.0, answer=0.0, spares=("c:1",), fewer=None):
    # Each worker that answers has been started at a time of its own.
    rounds = [
        [dataclasses.replace(health, start=health.start and number + 1) for number, health in each]
        for each in map(enumerate, rounds)
    ]
    monkeypatch.setattr("pipemesh.hosts.client.Asker", lambda addresses: Answers(*rounds))
    told = []
    cluster = Cluster(("a:1", "b:1"), spares)
    places, healths = client.gather(cluster, seconds, answer, told.append, fewer)
    assert all(health.devices for health in healths)
    return places, told


def test_a_spare_takes_the_place_of_one_that_is_missing(monkeypatch):
    assert gathered(monkeypatch, (WELL, WELL, WELL)) == ({0: "a:1", 1: "b:1"}, [])
    places, told = gathered(monkeypatch, (WELL, SILENT, WELL))
    assert places == {0: "a:1", 1: "c:1"}
    assert told == ["spare c:1 takes the place of worker 1 (b:1)"]


def test_a_worker_has_time_to_come_back(monkeypatch):
    places, told = gathered(monkeypatch, (WELL, SILENT, WELL), (WELL, WELL, WELL), answer=60.0)
    assert places == {0: "a:1", 1: "b:1"}
    assert told == ["waiting for 1 of 3 workers: worker 1 (b:1) has not answered for 1 s"]


def test_a_missing_worker_is_an_error_in_the_end(monkeypatch):
    with pytest.raises(DeviceError, match=r"worker 1 \(b:1\) has not answered .* start it there"):
        gathered(monkeypatch, (WELL, SILENT), seconds=0.0, spares=())


def test_available_workers_may_be_enough(monkeypatch):
    places, told = gathered(monkeypatch, (SILENT, WELL), spares=(), fewer=0.0)
    assert places == {1: "b:1"}
    assert told == ["going on without worker 0 (a:1), which has not answered for 1 s"]
    # None are never enough.
    with pytest.raises(DeviceError, match="start it there"):
        gathered(monkeypatch, (SILENT, SILENT), spares=(), fewer=0.0, seconds=0.5)


def test_two_addresses_of_one_worker_are_an_error(monkeypatch):
    monkeypatch.setattr("pipemesh.hosts.client.Asker", lambda addresses: Answers((WELL, WELL)))
    with pytest.raises(DeviceError, match="'a:1' and 'b:1' lead to one worker; give each worker"):
        client.gather(Cluster(("a:1", "b:1")), 5.0, 1.0, print)
