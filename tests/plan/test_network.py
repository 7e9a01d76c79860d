"""Links and groups: no faster than what has to be sent; and hosts."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan.network import Link, Network, over_hosts

links = st.builds(Link, st.floats(0, 1e-3), st.floats(1e6, 1e12))


@given(links, st.integers(2, 5000), st.floats(1, 1e10))
def test_all_reduce_is_within_its_bounds(link, members, size):
    """Each member has to send 2 (n - 1) / n of it (Patarasuk and Yuan), if nobody adds for it."""
    found = link.all_reduce(members, size)
    assert found >= 2 * (members - 1) / members * size / link.bandwidth * (1 - 1e-12)
    one_by_one = 2 * (members - 1) * link.seconds(size)
    assert found <= one_by_one * (1 + 1e-12)


@given(links, st.floats(1, 1e9), st.integers(1, 10), st.integers(0, 5), st.integers(1, 64))
def test_members_on_the_same_host_never_slow_a_sum(slow, size, hosts, power, host_size):
    fast = Link(0.0, slow.bandwidth * 1e6)
    members = hosts * 2**power
    spread = Network(1, fast, slow).all_reduce(members, 1, size)
    network = Network(host_size, fast, slow)
    assert network.all_reduce(members, 1, size) <= spread * (1 + 1e-3) + 1e-12


def test_a_host_sends_as_if_it_had_one_member():
    """8 members a host, 4 hosts: an eighth each goes round 4, beside what is free inside."""
    network = Network(8, Link(0.0, math.inf), Link(0.0, 1e9))
    assert network.all_reduce(32, 1, 8e9) == pytest.approx(2 * 3 / 4 * 1.0)
    # With a stride of 8 each member is on a host of its own.
    assert network.all_reduce(4, 8, 8e9) == pytest.approx(2 * 3 / 4 * 8.0)


def test_an_axis_over_hosts_uses_both_links():
    """4 of 8 members on each of 2 hosts: a reduce-scatter inside, a sum across, a gather inside."""
    network = Network(4, Link(0.0, 1e11), Link(0.0, 1e9))
    inside = 2 * 3 * 2e9 / 1e11
    assert network.all_reduce(8, 1, 8e9) == pytest.approx(inside + 2 * 1e9 / 1e9)
    # With a stride of 2, hosts have 2 members of each of two groups.
    assert network.all_reduce(8, 2, 8e9) == pytest.approx(2 * 4e9 / 1e11 + 2 * 3 * 1e9 / 1e9)
    # Hosts of 6: of groups of 4, every second one lies on two hosts, and was priced as on one.
    uneven = dataclasses.replace(network, host_size=6)
    assert uneven.all_reduce(4, 1, 8e9) == pytest.approx(2 * 4e9 / 1e11 + 2 * 2e9 / 1e9)
    assert uneven.all_reduce(3, 1, 8e9) == pytest.approx(2 * 2 * 8e9 / 3 / 1e11)


def test_nothing_is_sent_alone():
    link = Link(1.0, 1.0)
    assert link.all_reduce(1, 1e9) == 0
    assert Network(1, link, link).all_reduce(1, 1, 1e9) == 0
    assert link.seconds(0) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(-1.0, 1.0),
        lambda: Link(math.inf, 1.0),
        lambda: Link(0.0, 0.0),
        lambda: Link(0.0, math.nan),
        lambda: Network(0, Link(0.0, 1.0), Link(0.0, 1.0)),
    ],
)
def test_invalid_links_are_errors(make):
    with pytest.raises(PlanError):
        make()


PLACES = [
    # Slices lie on one host, however the axes are ordered, and replicas on several.
    ("layers:2;model:2", "d_ff:model", [2, 2], [0, 0, 1, 1], ()),
    ("model:2;layers:2", "d_ff:model", [2, 2], [0, 1, 0, 1], ()),
    ("model:2;data:2", "batch:data;d_ff:model", [2, 2], [0, 1, 0, 1], ()),
    # An axis inside of a replica that crosses hosts is named.
    ("layers:2;model:2", "d_ff:model", [1, 1, 1, 1], [0, 1, 2, 3], ("model",)),
    ("layers:1;model:2;seq:2", "d_ff:model;t:seq", [2, 2], [0, 0, 1, 1], ("model",)),
    ("layers:1;model:8", "d_ff:model", [4, 4], [0] * 4 + [1] * 4, ("model",)),
    # The axis that is written first crosses hosts, and members of the other are neighbours.
    ("layers:1;data:2;model:4", "batch:data;d_ff:model", [4, 4], [0] * 4 + [1] * 4, ()),
    ("layers:2;model:1,3", "d_ff:model", [2, 2], [0, 0, 1, 1], ("model",)),
    # Hosts have as many as they can.
    ("layers:3;data:2", "batch:data", [3, 3], [0, 0, 0, 1, 1, 1], ()),
    ("layers:4", "", [1, 8], [0, 1, 1, 1], ()),
    ("layers:3", "", [4, 4], [0, 0, 1], ()),
    ("layers:2", "", [4, 4, 4], [0, 1], ()),
]


@pytest.mark.parametrize(("mesh", "layout", "devices", "hosts", "crossing"), PLACES)
def test_processors_lie_on_hosts_so_that_little_crosses(mesh, layout, devices, hosts, crossing):
    found = over_hosts(Mesh.from_text(mesh), LayoutRules.from_text(layout), devices)
    assert [host for host, _ in found.places] == hosts
    assert len(set(found.places)) == len(hosts) and found.crossing == crossing
    assert found.idle == tuple(sorted(set(range(len(devices))) - set(hosts)))


def test_too_few_devices_are_an_error():
    with pytest.raises(PlanError, match="it has 4 processors, but 2 workers have 3 devices"):
        over_hosts(Mesh.from_text("layers:4"), LayoutRules(), [1, 2])


@given(links, st.integers(1, 64), st.floats(1, 1e9))
def test_a_ring_gathers_as_it_reduces(link, members, size):
    """An all-reduce by a ring is a reduce-scatter and an all-gather of the parts."""
    ring = 2 * (members - 1) * (link.latency + size / members / link.bandwidth)
    assert math.isclose(2 * link.all_gather(members, size / members), ring, abs_tol=1e-18)
