"""Seconds of counted programs on a machine."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import PlanError
from pipemesh.mesh import Mesh
from pipemesh.plan import Link, Machine, Network
from pipemesh.plan.machine import by_work, least_seconds

MESH = Mesh.from_text("rows:2;cols:4")
SLOW, FAST = Link(1e-5, 1e9), Link(1e-6, 1e11)


class Counted:
    """Counts of one device."""

    def __init__(self, rows=None, work=None):
        self.rows, self.work = rows or {}, work or {}


def test_an_operation_is_bound_by_flops_or_by_memory():
    machine = Machine(flops=1e9, bandwidth=1e8, call=1e-3)
    work = {
        (("rows",), "einsum", "forward"): (2, 4e9, 1e6),
        ((), "relu", "forward"): (1, 1e3, 3e8),
    }
    found = machine.parts(Counted(work=work), MESH, times=2)
    assert found == {"compute": pytest.approx(2 * (4 + 3 + 3e-3))}


@pytest.mark.parametrize("primitive", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_what_is_sent_takes_what_the_links_need(primitive):
    """The last axis has neighbours, which are on one host of four."""
    machine = Machine(1e9, network=Network(4, FAST, SLOW))
    seconds = {}
    for axes in (("cols",), ("rows",)):
        row = {(axes, primitive, "forward"): (2, 6_000_000)}
        (seconds[axes],) = (v for k, v in machine.parts(Counted(row), MESH).items() if k in axes)
    assert seconds["cols",] == pytest.approx(6e6 / 1e11, rel=1)
    assert seconds["rows",] == pytest.approx(6e6 / 1e9, rel=0.02)


@pytest.mark.parametrize(
    ("mesh", "axes", "members", "stride"),
    [
        ("rows:2;cols:4", "rows cols", 8, 1),
        ("rows:2;cols:4", "rows", 2, 4),
        ("all:8", "all", 8, 1),
        # Every second group lies on two hosts.
        ("rows:4;cols:3", "cols", 3, 1),
    ],
)
def test_sums_over_hosts_have_the_networks_price(mesh, axes, members, stride):
    network = Network(4, FAST, SLOW)
    row = {(tuple(axes.split()), "all_reduce", "forward"): (2, 2 * 1000)}
    (_, found) = Machine(1e9, network=network).parts(Counted(row), Mesh.from_text(mesh)).values()
    assert found == pytest.approx(
        2 * network.all_reduce(members, stride, 1000 * members / (members - 1) / 2)
    )


def test_what_else_goes_over_hosts_is_as_slow_as_they_are():
    machine = Machine(1e9, network=Network(4, FAST, SLOW))
    row = {(("rows", "cols"), "all_gather", "forward"): (1, 1000)}
    found = machine.parts(Counted(row), MESH)["rows+cols"]
    assert found == SLOW.collective("all_gather", 8, 1000)


SETS = st.lists(
    st.tuples(
        st.sets(st.sampled_from("abc"), min_size=1).map(sorted).map(tuple),
        st.floats(1, 1e6),
        st.floats(1, 1e6),
    ),
    min_size=1,
    max_size=4,
)


@given(SETS, st.integers(0, 3))
def test_the_bound_is_below_all_that_it_covers(operations, decided):
    work = {(dims, str(i), "forward"): (1, f, b) for i, (dims, f, b) in enumerate(operations)}
    machine = Machine(1e3, 1e3, call=1e-2)
    least = least_seconds(work, MESH, machine)
    lowest = {}
    for axes in itertools.product((None, "rows", "cols"), repeat=3):
        given = dict(zip("abc", axes, strict=True))
        exact = 0.0
        for (dims, _, _), row in work.items():
            parts = math.prod(MESH.size(a) for a in {given[dim] for dim in dims} - {None})
            exact += machine.operation(row[0], row[1] / parts, row[2] / parts)
        assert least(given) == pytest.approx(exact)
        begin = axes[:decided]
        lowest[begin] = min(lowest.get(begin, math.inf), exact)
    for begin, exact in lowest.items():
        assert least(dict(zip("abc", begin, strict=False))) <= exact * (1 + 1e-9)


def test_dims_with_most_work_come_first():
    work = {(("a", "b"), "x", "forward"): (1, 5, 0), (("b", "c"), "y", "forward"): (1, 9, 0)}
    assert by_work(work, ["a", "b", "c"]) == ["b", "c", "a"]


@pytest.mark.parametrize("values", [{"flops": 0}, {"bandwidth": 0}, {"call": -1}])
def test_figures_of_a_machine_are_positive(values):
    with pytest.raises(PlanError, match="must be above 0"):
        Machine(**{"flops": 1.0} | values)
