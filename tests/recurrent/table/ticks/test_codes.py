"""What actions of a kind take and leave, and which of it goes to another home."""

from pipemesh.recurrent.remat import FULL, NONE
from pipemesh.recurrent.table.kinds import GRADS, KEPT, OUTPUTS, PENDING, Channel
from pipemesh.recurrent.table.lists import Lists
from pipemesh.recurrent.table.ticks.codes import Roles
from pipemesh.schedule import Action, execution_order, forward_only, one_f_one_b, zb_v


def roles_of(schedule, mode=FULL):
    order = execution_order(schedule)
    modes = {(action.stage, action.microbatch): mode for action in order}
    return Roles(order, schedule.stage_devices, modes)


def test_what_stays_on_a_home_lies_in_lists_and_the_rest_is_sent():
    roles = roles_of(one_f_one_b(3, 3), NONE)
    forward, backward = roles.of(Action(1, "F", 0)), roles.of(Action(1, "B", 0))
    kept = Lists.key(KEPT, 1, NONE)
    assert (forward.takes, forward.puts) == ((), (kept,))
    assert (forward.hears, forward.tells) == ((Channel(OUTPUTS, 0),), (Channel(OUTPUTS, 1),))
    assert (backward.takes, backward.puts) == ((kept,), ())
    assert (backward.hears, backward.tells) == ((Channel(GRADS, 2),), (Channel(GRADS, 1),))


def test_what_leaves_the_pipeline_lies_in_a_list():
    roles = roles_of(one_f_one_b(2, 3))
    assert Lists.key(OUTPUTS, 1, FULL) in roles.of(Action(1, "F", 0)).puts
    assert roles.of(Action(0, "B", 0)).puts == (Lists.key(GRADS, 0, FULL),)
    assert roles.leaves(Channel(GRADS, 0)) and not roles.leaves(Channel(GRADS, 1))


def test_neighbours_on_one_home_send_nothing():
    """At the turn of a V."""
    roles = roles_of(zb_v(2, 4))
    assert roles.of(Action(1, "F", 0)).tells == ()
    assert roles.of(Action(2, "F", 0)).takes == (Lists.key(OUTPUTS, 1, FULL),)
    assert Lists.key(PENDING, 1, FULL) in roles.of(Action(1, "I", 0)).puts


def test_what_nobody_takes_is_not_kept():
    role = roles_of(forward_only(2, 3)).of(Action(0, "F", 0))
    assert (role.puts, role.tells) == ((), (Channel(OUTPUTS, 0),))
