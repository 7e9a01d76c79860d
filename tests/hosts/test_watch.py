"""Reports of lost workers."""

import threading
import time

import pytest
import tensorflow as tf

from pipemesh.errors import DeviceError
from pipemesh.hosts.health import Health
from pipemesh.hosts.watch import Watch

WELL = Health(("CPU:0",), 7)
SILENT = Health(trouble="has not answered for 1 s")


class Answers:
    """Stands for the connections; each round of answers is given once, the last for ever."""

    def __init__(self, *rounds):
        self.rounds, self.asked = list(rounds), 0

    def ask(self, seconds):
        found = self.rounds[min(self.asked, len(self.rounds) - 1)]
        self.asked += 1
        return list(found)

    def close(self):
        self.rounds = []


class Lost(Exception):
    pass


def lost(told):
    raise Lost(told)


def watch(*rounds):
    found = Watch({0: "a:1", 1: "b:1"}, [7, 7], 1.0, lost)
    found._asker.close()
    found._asker = Answers(*rounds)
    return found


def test_a_worker_that_answers_later_is_not_lost():
    found = watch((WELL, WELL))
    found.check()
    assert found._asker.asked == 1
    found = watch((WELL, SILENT), (WELL, WELL))
    found.check(tf.errors.InvalidArgumentError(None, None, "a shape"))
    assert found._asker.asked == 2


def test_a_loss_names_worker_stage_and_step():
    found = watch((WELL, SILENT))
    found.stages = {1: "stages 1, 3"}
    found.begin("step 4")
    wanted = r"worker 1 \(b:1, stages 1, 3\) has not answered for 1 s, in step 4, begun 0.\d s ago"
    with pytest.raises(Lost, match=wanted):
        found.check()


def test_a_restarted_worker_counts_as_lost():
    with pytest.raises(Lost, match=r"worker 0 \(a:1\) was started again"):
        watch((Health(("CPU:0",), 8), WELL)).check()


BROKEN = (
    "sendmsg: Connection reset by peer (104)\nAdditional GRPC error information from remote target "
    'a while calling /b: :UNKNOWN:Error {grpc_message:"sendmsg", grpc_status:14}'
)


# Of two workers of which one does not get what the other sends.
ONE_WAY = """Graph execution error:

Detected at node Sum_1/ReadVariableOp/_8 defined at (most recent call last):
<stack traces unavailable>
2 root error(s) found.
  (0) UNAVAILABLE:   failed to connect to all addresses; last error: UNKNOWN: ipv4:10.77.0.3:2: gone
Additional GRPC error information from remote target /job:worker/replica:0/task:1 while calling \
/tensorflow.WorkerService/RecvTensor:
:UNKNOWN:Error received from peer  {grpc_message:"failed to connect", grpc_status:14}
Additional GRPC error information from remote target /job:worker/replica:0/task:0/device:CPU:0 \
while calling /tensorflow.eager.EagerService/RunComponentFunction:
"""
CANCELLED = """Graph execution error:

Detected at node Sum_1/ReadVariableOp/_8 defined at (most recent call last):
<stack traces unavailable>
RecvFromRemoteAsync is cancelled.
"""


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (
            tf.errors.UnavailableError(None, None, "recvmsg:Connection reset by peer"),
            r"\(recvmsg:Connection reset by peer\)",
        ),
        (
            tf.errors.UnknownError(None, None, BROKEN),
            r"\(sendmsg: Connection reset by peer \(104\)\)",
        ),
        (
            tf.errors.UnavailableError(None, None, ONE_WAY),
            r"\(worker 0 \(a:1, stage 0\) got no answer from worker 1 \(b:1\): ipv4.*: gone\)",
        ),
        (
            tf.errors.CancelledError(None, None, CANCELLED),
            r"\(RecvFromRemoteAsync is cancelled\.\)",
        ),
    ],
)
def test_a_broken_connection_counts_as_lost_and_names_its_workers(error, wanted):
    found = watch((WELL, WELL))
    found.stages = {0: "stage 0"}
    found.progress = Progress({1: ["b waits for a"]})
    found.begin("step 4", is_step=True)
    wanted = rf"^a connection broke in step 4, begun 0.\d s ago {wanted}\n  b waits for a$"
    with pytest.raises(Lost, match=wanted):
        found.check(error)
    outer = DeviceError("step 4 failed")
    outer.__cause__ = error
    with pytest.raises(Lost, match=wanted):
        found.check(outer)


def test_a_refused_connection_is_a_loss():
    told = []
    found = Watch({0: "127.0.0.1:9"}, [7], 0.5, told.append)
    begun = time.monotonic()
    found.start()
    while not told and time.monotonic() - begun < 20:
        time.sleep(0.01)
    found.stop()
    assert "is not there (connection refused)" in told[0]


def test_an_error_of_the_watch_does_not_end_it_silently(monkeypatch):
    """A worker that was lost then would have been waited for without end."""
    monkeypatch.setattr("pipemesh.hosts.watch._PAUSE", 0.001)
    told, lost = [], threading.Event()
    found = Watch({0: "a:1"}, [7], 1.0, lambda what: lost.set(), tell=told.append)
    found._asker.close()
    found._asker = Answers(None)
    found.start()
    assert lost.wait(20)
    assert told == [
        "the watch of workers fails (TypeError: 'NoneType' object is not iterable); it tries again"
    ]
    lost.clear()
    # What works again is watched again.
    found._asker = Answers((SILENT,))
    assert lost.wait(20)
    found.stop()


class Progress:
    def __init__(self, waits):
        self.found, self.looks = waits, 0

    def look(self):
        self.looks += 1

    def waits(self):
        return dict(self.found)


def test_a_loss_names_the_action_and_the_waiting_worker():
    found = watch((WELL, SILENT))
    found.progress = Progress({0: ["a waits for b"], 1: ["b is in 1F0"]})
    found.begin("step 4", is_step=True)
    with pytest.raises(Lost, match=r"begun 0.\d s ago; b is in 1F0\n  a waits for b$"):
        found.check()


def ended_steps(found, *seconds):
    for each in seconds:
        found.begin("a step", is_step=True)
        found._since -= each
        found.end_step()


def test_the_step_limit_is_a_multiple_of_earlier_steps():
    found = watch((WELL, WELL))
    found.begin("step 1", is_step=True)
    assert found.limit == 1200
    ended_steps(found, 30, 9, 10)
    found.begin("step 4", is_step=True)
    assert found.limit == pytest.approx(200, rel=1e-3)
    ended_steps(found, 1, 1, 1, 1, 1)
    found.begin("step 9", is_step=True)
    assert found.limit == 60
    # Graphs may be built for what is no step.
    with found.during("evaluation"):
        assert found.limit == 1200
    assert (found.doing, found.limit) == ("step 9", 60)
    with found.during("connecting", 5.0):
        assert found.limit == 5
    assert found.limit == 60


def test_a_blocked_step_is_reported_once_then_given_up():
    told = []
    found = Watch({0: "a:1", 1: "b:1"}, [7, 7], 1.0, lost, 5.0, told.append)
    found.progress = Progress({1: ["b is in 1F0"]})
    ended_steps(found, 1, 1, 1)
    found.begin("step 4", is_step=True)
    found._since -= 4
    found._check_progress()
    assert (found.progress.looks, told) == (1, [])
    found._since -= 2
    found._check_progress()
    found._check_progress()
    wanted = "step 4 has lasted for 6 s, and all workers answer; unfinished devices:"
    assert told == [f"{wanted}\n  b is in 1F0"]
    found._since -= 4
    with pytest.raises(Lost, match="step 4 does not end: it has lasted for 10 s"):
        found._check_progress()


def test_work_without_a_limit_may_last():
    found = watch((WELL, WELL))
    found.begin("what follows a step")
    found._since -= 10_000
    found._check_progress()
