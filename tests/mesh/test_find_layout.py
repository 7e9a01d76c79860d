"""The search for layout rules: the best of all, and why it ended."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import LayoutError
from pipemesh.mesh import LayoutRules, Mesh, Price, Pricing, find_layout

MESH = Mesh.from_text("rows:2;cols:4")
DIMS = {"batch": [8], "hidden": [16, 12], "io": [6]}
# Dims of operations, and their seconds on one processor.
WORK = {("batch", "io", "hidden"): 6.0, ("batch", "hidden"): 1.5, ("io",): 1.0}


def share(dims, axes):
    return math.prod(MESH.size(axis) for axis in {axes.get(dim) for dim in dims} - {None})


def least(decided):
    """Dims that are not decided split everything."""
    every = {dim: f"any {dim}" for dim in DIMS}

    def size(dims):
        given = {decided.get(dim, every[dim]) for dim in dims}
        is_open = any(axis in every.values() for axis in given)
        return MESH.num_devices if is_open else share(dims, decided)

    return Price(sum(seconds / size(dims) for dims, seconds in WORK.items()))


def pricing(sent, bound=least):
    """A program that sends for each pair of dim and axis."""

    def price(rules):
        axes = dict(rules.rules)
        if len({*axes.values()} & {"rows"}) < list(axes.values()).count("rows"):
            raise LayoutError("two dims over rows")
        compute = sum(seconds / share(dims, axes) for dims, seconds in WORK.items())
        extra = sum(sent.get(rule, 0.0) for rule in rules.rules)
        memory = 100 / share(["hidden", "io"], axes)
        return Price(compute + extra, memory, {"compute": compute, "sent": extra})

    return Pricing(MESH, DIMS, price, bound)


def all_prices(pricing):
    """Every legal layout with its price."""
    found = {}
    for axes in itertools.product((None, *MESH.axis_names), repeat=len(DIMS)):
        rules = LayoutRules(tuple((d, a) for d, a in zip(DIMS, axes, strict=True) if a))
        if all(n % MESH.size(axis) == 0 for dim, axis in rules.rules for n in DIMS[dim]):
            try:
                found[str(rules)] = pricing.price(rules)
            except LayoutError:
                continue
    return found


@given(
    st.dictionaries(
        st.tuples(st.sampled_from(list(DIMS)), st.sampled_from(MESH.axis_names)), st.floats(0, 4)
    ),
    st.sampled_from([None, 100, 60, 15]),
)
def test_the_best_of_all_layouts_is_found(sent, memory):
    program = pricing(sent)
    every = all_prices(program)
    fitting = [p.seconds for p in every.values() if memory is None or p.memory <= memory]
    found = find_layout(program, memory=memory)
    assert found.is_best
    assert found.price.seconds == min(fitting)
    assert found.price == every[str(found.rules)]
    assert {str(rules) for rules, _ in found.table} <= set(every)


def test_bounds_leave_out_what_cannot_be_best():
    sent = {("hidden", "cols"): 0.1, ("io", "rows"): 3.0}
    bounded, unbounded = (
        find_layout(program)
        for program in (pricing(sent), pricing(sent, lambda decided: Price(0.0)))
    )
    assert bounded.rules == unbounded.rules
    assert len(unbounded.table) == len(all_prices(pricing(sent)))
    assert len(bounded.table) < len(unbounded.table) / 2


def test_dims_that_meet_never_share_an_axis():
    program = pricing({})
    meeting = {frozenset(DIMS)}
    found = find_layout(Pricing(MESH, DIMS, program.price, meeting=meeting))
    assert not found.refused
    assert all(len({a for _, a in r.rules}) == len(r.rules) for r, _ in found.table)


def test_fixed_rules_stay():
    found = find_layout(pricing({("io", "rows"): 9.0}), fixed="io:rows")
    assert found.rules.axis("io") == "rows"


def test_an_ended_search_says_that_it_may_not_be_best():
    found = find_layout(pricing({}, lambda decided: Price(0.0)), most=3)
    assert not found.is_best
    assert len(found.table) + len(found.refused) == 3
    assert str(found).endswith("not all rules were priced")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 10}, "no layout on mesh .* fits into 10 bytes .* needs least, "),
        ({"most": 1}, "no layout that was tried .* can split the program"),
        ({"memory": 10, "most": 9}, "not all were priced: give a longer search, more memory"),
        ({"fixed": "io:row"}, "names axis 'row'.*did you mean 'rows'"),
        ({"fixed": "oi:rows"}, "names dim 'oi', which no tensor has"),
    ],
)
def test_what_cannot_be_found_is_an_error(options, message):
    with pytest.raises(LayoutError, match=message):
        find_layout(pricing({}), **options)


def test_the_reason_of_refused_rules_is_kept():
    def price(rules):
        raise LayoutError("nothing goes")

    with pytest.raises(LayoutError, match=r"no layout can split the program .* nothing goes"):
        find_layout(Pricing(MESH, DIMS, price))


def test_the_table_has_all_parts():
    lines = str(find_layout(pricing({("batch", "rows"): 1.0}))).splitlines()
    assert lines[0].split() == ["layout", "ms", "compute", "ms", "sent", "ms", "memory", "MB"]
    assert lines[-1].startswith("best: '")
