"""Several processes agree on which of them take part."""

import json
import os
import threading
import time

import pytest

from pipemesh.errors import DeviceError, PlanError
from pipemesh.hosts import Cluster
from pipemesh.hosts.peers import Joined
from pipemesh.hosts.rollcall import RollCall, Wish
from pipemesh.hosts.roster import Member, Roster, Rosters
from tests.lowering.hosts_process import free_ports

# In seconds; short, as all are on this machine.
ANSWER, PATIENCE, LIMIT, MOST = 1.0, 0.7, 1.5, 30.0


class Caller:
    """A process among several, as a thread."""

    def __init__(self, folder, cluster, index, **wish):
        keywords = {"answer": ANSWER, "patience": PATIENCE, "limit": LIMIT, **wish}
        self.told, self.found, self.error = [], None, None
        self.rosters = Rosters(str(folder))
        self.call = RollCall(Wish(cluster, index, **keywords), self.rosters, self.told.append)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.found = self.call.agree()
        except Exception as error:
            self.error = error

    def agreed(self):
        """Its number, among how many, under which plan."""
        self._thread.join(MOST)
        assert not self._thread.is_alive(), self.told
        if self.error:
            raise self.error
        return self.found and (self.found.place_of(self.call.start), self.found)

    def is_waiting(self):
        return self._thread.is_alive()


@pytest.fixture
def callers(tmp_path):
    """Starts those with some of the numbers, of so many processes and spares."""
    begun = []

    def start(cluster, *indices, folder=tmp_path, **wish):
        found = [Caller(folder, cluster, index, **wish) for index in indices]
        begun.extend(found)
        return found

    yield start
    for each in begun:
        each.call.close()


def of(number, spares=0):
    ports = [f"127.0.0.1:{port}" for port in free_ports(number + spares)]
    return Cluster(tuple(ports[:number]), tuple(ports[number:]))


def half(there):
    """One of two, two of three, under a plan of their own."""
    return (there // 2 * 2 or 1), f"of {there}"


def until(is_so, seconds=MOST):
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_all_that_are_there_begin_at_once_with_their_own_numbers(callers):
    begun = time.monotonic()
    found = [each.agreed() for each in callers(of(3), 2, 0, 1, patience=60.0, limit=60.0)]
    assert [number for number, _ in found] == [2, 0, 1]
    assert len({roster for _, roster in found}) == 1
    assert not found[0][1].plan
    assert time.monotonic() - begun < 20


def test_one_that_others_name_before_it_has_looked_takes_part(callers, tmp_path):
    """It answers a moment before it looks for the first time."""
    cluster = of(2)
    wish = Wish(cluster, 1, ANSWER, PATIENCE, LIMIT)
    with RollCall(wish, Rosters(str(tmp_path)), print) as second:
        (first,) = callers(cluster, 0)
        assert first.agreed()[0] == 0
        assert second.agree() == first.found


@pytest.mark.parametrize("there", [(0,), (1,), (1, 2), (0, 2), (2,)])
def test_those_that_are_there_go_on_without_the_others_and_are_renumbered(there, callers):
    cluster = of(3)
    found = [each.agreed() for each in callers(cluster, *there, fit=lambda n: (n, f"of {n}"))]
    assert [number for number, _ in found] == list(range(len(there)))
    assert {roster.plan for _, roster in found} == {f"of {len(there)}"}
    roster = found[0][1]
    assert roster.addresses().workers == tuple(cluster.workers[i] for i in there)
    told = roster.told()
    for index in {0, 1, 2} - {*there}:
        assert f"process {index} ({cluster.workers[index]})" in told[0]
    assert told[0].startswith("going on without process")
    assert ("has the log directory from now on" in told[-1]) == (0 not in there)


@pytest.mark.slow
def test_one_that_the_smaller_plan_has_no_use_for_waits(callers):
    cluster = of(4)
    first, second, third = callers(cluster, 3, 1, 2, fit=half)
    assert second.agreed()[0] == 0
    assert third.agreed()[0] == 1
    time.sleep(2 * PATIENCE)
    assert first.is_waiting()
    assert f"process 3 ({cluster.workers[3]}) comes too late: process 1 (" in first.told[-1]
    assert second.rosters.say(Roster(2, second.found.cluster, ended=True))
    assert first.agreed() is None
    assert "the training has ended, and process 3" in first.told[-1]


@pytest.mark.slow
def test_one_that_comes_late_waits_and_takes_part_when_all_begin_again(callers):
    cluster = of(2)
    (alone,) = callers(cluster, 1, fit=half)
    assert alone.agreed()[0] == 0
    (late,) = callers(cluster, 0, fit=half)
    time.sleep(2 * PATIENCE)
    assert late.is_waiting()
    # It begins again.
    alone.call.close()
    (again,) = callers(cluster, 1, fit=half)
    assert late.agreed()[0] == 0
    number, roster = again.agreed()
    assert (number, roster.number, roster.plan) == (1, 2, "")
    # Who takes part in the first beginning only learns that it is over.
    told = Joined(alone.found, 0, alone.call, alone.rosters).superseded()
    assert "have begun again" in told
    assert not Joined(roster, 1, again.call, again.rosters).superseded()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_spare_takes_the_place_and_the_number_of_one_that_stays_lost(lost, callers):
    cluster = of(2, 1)
    first, second, spare = callers(cluster, 0, 1, 2, patience=2.0, limit=60.0)
    assert [each.agreed()[0] for each in (first, second)] == [0, 1]
    until(lambda: spare.told)
    assert "spare" in spare.told[-1] and "waits until a process is lost" in spare.told[-1]
    first.call.close()
    second.call.close()
    (left,) = callers(cluster, 1 - lost, patience=2.0, limit=60.0)
    number, roster = spare.agreed()
    assert (number, left.agreed()) == (lost, (1 - lost, roster))
    assert not roster.plan
    name = f"process {lost} ({cluster.workers[lost]})"
    assert f"spare {cluster.spares[0]} takes the place of {name}" in roster.told()


def test_without_a_spare_that_is_there_it_is_an_error_that_says_who_waits_for_whom(callers):
    cluster = of(2, 1)
    (alone,) = callers(cluster, 0)
    with pytest.raises(DeviceError) as error:
        alone.agreed()
    assert str(error.value).startswith(f"process 0 ({cluster.workers[0]}) waits for process 1 (")
    assert "is not there (connection refused), and no spare is there, for" in str(error.value)


def test_without_a_smaller_plan_it_is_an_error(callers):
    def none(there):
        raise PlanError(f"no plan for {there}")

    first, second = callers(of(3), 0, 2, fit=none)
    with pytest.raises(PlanError, match="no plan for 2"):
        first.agreed()
    # It ends, and the other one is alone.
    first.call.close()
    with pytest.raises(PlanError, match="no plan for 1"):
        second.agreed()


@pytest.mark.slow
def test_who_waits_for_one_that_does_not_notice_that_another_is_gone_says_so(callers):
    cluster = of(2)
    first, second = callers(cluster, 0, 1, answer=0.3)
    assert [each.agreed()[0] for each in (first, second)] == [0, 1]
    # The first one is still about to begin.
    second.call.close()
    (again,) = callers(cluster, 1, answer=0.3)
    with pytest.raises(DeviceError) as error:
        again.agreed()
    assert "waits until the others have noticed that it was gone" in again.told[0]
    assert str(error.value).startswith(
        f"process 1 ({cluster.workers[1]}) waits for process 0 ({cluster.workers[0]}), which "
        "computes with others that are gone, and does not begin again, for"
    )


def test_who_takes_part_and_does_not_begin_is_not_waited_for(callers, monkeypatch):
    monkeypatch.setattr("pipemesh.hosts.rollcall.SECONDS_TO_START", 1.0)
    cluster = of(2)
    first, second = callers(cluster, 0, 1)
    assert [each.agreed()[0] for each in (first, second)] == [0, 1]
    second.call.close()
    (again,) = callers(cluster, 1, fit=half)
    number, roster = again.agreed()
    assert (number, len(roster.members)) == (0, 1)


def test_of_several_that_say_who_takes_part_one_counts(tmp_path):
    cluster, said = of(2), []
    every = [Roster(7, cluster, (Member(0, str(i), 0),)) for i in range(16)]
    start = threading.Barrier(len(every))

    def say(roster):
        start.wait()
        if Rosters(str(tmp_path)).say(roster):
            said.append(roster)

    threads = [threading.Thread(target=say, args=[each]) for each in every]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert said == [Rosters(str(tmp_path)).newest()]
    assert os.listdir(tmp_path) == ["processes-7.json"]


def test_who_was_stopped_before_it_said_so_learns_that_others_have_gone_on(tmp_path):
    rosters, cluster = Rosters(str(tmp_path)), of(2)
    for number in range(1, 5):
        assert rosters.say(Roster(number, cluster))
    # Its number was taken, and taken away.
    assert not rosters.say(Roster(2, cluster, (Member(1, "late", 1),)))
    assert rosters.newest() == Roster(4, cluster)


def test_two_trainings_do_not_share_a_folder(callers, tmp_path):
    from pipemesh.checkpoint import Folder

    (first,) = callers(of(1), 0)
    assert first.agreed()
    other = of(1)
    with Folder(str(tmp_path), shared=True):
        (second,) = callers(other, 0)
        with pytest.raises(DeviceError, match="in use: another training"):
            second.agreed()
    second.call.close()
    (third,) = callers(other, 0)
    assert third.agreed()[1].number == 2


ROSTER = {
    "number": 1,
    "cluster": {"workers": ["a:1", "b:1"], "spares": []},
    "members": [{"index": 1, "start": "x", "place": 0}],
    "plan": "",
    "ended": False,
}
MEMBER = ROSTER["members"][0]


@pytest.mark.parametrize(
    "content",
    [
        *(b"{}", b"[]", b"3", b"", b"\xff", b"[" * 100_000),
        *({"cluster": {"workers": workers, "spares": []}} for workers in ([1], 5, [None], "a:1")),
        *({"members": members} for members in ([1], 5, [{}], [MEMBER | {"more": 1}])),
        *({"members": [MEMBER | {name: 2}]} for name in ("index", "start", "place")),
        *({"members": [MEMBER | {"index": "a"}]}, {"number": 2}, {"number": None}, {"plan": 1}),
    ],
)
def test_a_roster_that_is_malformed_is_an_error(content, tmp_path):
    path, rosters = tmp_path / "processes-1.json", Rosters(str(tmp_path))
    path.write_text(json.dumps(ROSTER))
    assert rosters.newest().members == (Member(1, "x", 0),)
    path.write_bytes(
        content if isinstance(content, bytes) else json.dumps(ROSTER | content).encode()
    )
    with pytest.raises(DeviceError, match=r"processes-1\.json does not say .*; remove it"):
        rosters.newest()


def test_a_process_may_not_be_named_twice(callers):
    (port,) = free_ports(1)
    (only,) = callers(Cluster((f"127.0.0.1:{port}", f"localhost:{port}")), 0)
    with pytest.raises(DeviceError, match="lead to one process; give each process once"):
        only.agreed()
