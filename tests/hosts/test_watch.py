"""What is said of a worker that is lost, and when."""

import time

import pytest

from pipemesh.errors import DeviceError
from pipemesh.hosts import Cluster, gather
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


def test_workers_that_answer_are_not_lost():
    found = watch((WELL, WELL))
    found.check()
    assert found._asker.asked == 1


def test_who_answers_when_asked_once_more_is_not_lost():
    found = watch((WELL, SILENT), (WELL, WELL))
    found.check()
    assert found._asker.asked == 2


def test_what_is_said_names_worker_stage_and_step():
    found = watch((WELL, SILENT))
    found.stages = {1: "stages 1, 3"}
    found.begin("step 4")
    wanted = r"worker 1 \(b:1, stages 1, 3\) has not answered for 1 s, in step 4, begun 0.\d s ago"
    with pytest.raises(Lost, match=wanted):
        found.check()


def test_a_worker_that_was_started_again_has_forgotten_everything():
    with pytest.raises(Lost, match=r"worker 0 \(a:1\) was started again"):
        watch((Health(("CPU:0",), 8), WELL)).check()


def test_nobody_listens():
    told = []
    found = Watch({0: "127.0.0.1:9"}, [7], 0.5, told.append)
    begun = time.monotonic()
    found.start()
    while not told and time.monotonic() - begun < 20:
        time.sleep(0.01)
    found.stop()
    assert "is not there (connection refused)" in told[0]


def gathered(monkeypatch, *rounds, seconds=5.0, answer=0.0, spares=("c:1",)):
    monkeypatch.setattr("pipemesh.hosts.gather.Asker", lambda addresses: Answers(*rounds))
    told = []
    cluster = Cluster(("a:1", "b:1"), spares)
    places, healths = gather.gather(cluster, seconds, answer, told.append)
    assert all(health.devices for health in healths)
    return places, told


def test_all_are_there(monkeypatch):
    assert gathered(monkeypatch, (WELL, WELL, WELL)) == ({0: "a:1", 1: "b:1"}, [])


def test_a_spare_takes_the_place_of_one_that_is_missing(monkeypatch):
    places, told = gathered(monkeypatch, (WELL, SILENT, WELL))
    assert places == {0: "a:1", 1: "c:1"}
    assert told == ["spare c:1 takes the place of worker 1 (b:1)"]


def test_a_worker_has_time_to_come_back(monkeypatch):
    places, told = gathered(monkeypatch, (WELL, SILENT, WELL), (WELL, WELL, WELL), answer=60.0)
    assert places == {0: "a:1", 1: "b:1"}
    assert told == ["waiting for 1 of 3 workers: worker 1 (b:1) has not answered for 1 s"]


def test_who_does_not_come_is_an_error_in_the_end(monkeypatch):
    with pytest.raises(DeviceError, match=r"worker 1 \(b:1\) has not answered .* start it there"):
        gathered(monkeypatch, (WELL, SILENT), seconds=0.0, spares=())
