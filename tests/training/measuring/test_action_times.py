"""Times of actions, of steps that only say what they took."""

import itertools

import pytest

from pipemesh.schedule import Action
from pipemesh.training.measuring.action_times import (
    ROUNDS,
    in_turn,
    on_one_core,
    times_of,
    usual,
)


class Said:
    """A step whose actions take a second for each row of each layer, and something more."""

    def __init__(self, layers, rows, more=0.0, kinds="FB"):
        self.before, self.after, self.runs = 0.25, 0.5, 0
        self._own = [(layer, kind) for layer in range(layers) for kind in kinds]
        self._rows, self._more = rows, more

    def run(self):
        self.runs += 1
        return 0.0

    def durations(self):
        # The first microbatch adds up no gradients, and some steps take longer.
        late = 10.0 if self.runs % 3 == 0 else 0.0
        return {
            Action(layer, kind, m): self._rows * (layer + 1) * (m or 0.1) + self._more + late
            for (layer, kind), m in itertools.product(self._own, (0, 1))
        }


class Whole(Said):
    """All layers in one action of 1 + 2 + 3 seconds a row; the first microbatch takes less."""

    def durations(self):
        late = 10.0 if self.runs % 3 == 0 else 0.0
        return {
            Action(0, k, m): 6 * self._rows * (m or 0.1) + self._more + late
            for k in "FB"
            for m in (0, 1)
        }


def test_layers_take_what_their_actions_take_without_overhead():
    steps = [Said(3, 1, 0.25), Said(3, 4, 0.25)]
    times = times_of(steps, [1, 4], 3, Whole(1, 1, 0.25))
    assert {step.runs for step in steps} == {ROUNDS}
    assert (times.before, times.after) == (0.25, 0.5)
    # Three actions have the overhead three times, and one has it once.
    assert times.besides(1) == pytest.approx(0.25)
    layers = times.of_layers(0.25)
    assert layers[0]["F"] == pytest.approx({1: 1, 4: 4})
    assert layers[2]["B"] == pytest.approx({1: 3, 4: 12})


def test_where_something_is_computed_again_that_alone_counts():
    """The other actions of such a step have less to do, and others say what they take."""
    times = times_of([Said(2, 4, kinds="FB"), Said(2, 8, kinds="FRB")], [4, 4], 2, Whole(1, 4))
    layers = times.of_layers(0.0)
    assert layers[1]["F"] == pytest.approx({4: 8}) and layers[1]["B"] == pytest.approx({4: 8})
    assert layers[1]["R"] == pytest.approx({4: 16})


def test_a_layer_takes_something_whatever_its_action_takes_besides():
    times = times_of([Said(1, 1)], [1], 1, Whole(1, 1))
    assert times.besides(1) == 0.0
    assert times.of_layers(5.0)[0]["F"] == pytest.approx({1: 0.1})


def test_on_one_core_times_are_those_of_the_same_steps():
    step = Said(2, 3)
    times = on_one_core([step], [3], 2, Whole(1, 3))
    assert times is None or times.of_layers(0.0)[1]["F"] == pytest.approx({3: 6})


def test_what_is_usual_is_not_the_shortest_and_not_disturbed():
    assert usual([5.0]) == 5.0
    assert usual([1.0, 1.2, 90.0, 80.0]) == pytest.approx(1.1)


def test_what_is_done_in_turn_does_not_feel_a_machine_that_becomes_slower():
    """Half of the rounds on a machine half as fast, and one time that was disturbed."""
    rounds = [[1.0, 3.0, 4.0], [1.0, 3.0, 4.0], [1.0, 3.0, 4.0], [2.0, 6.0, 8.0], [2.0, 6.0, 8.0]]
    assert in_turn(rounds) == pytest.approx([1.0, 3.0, 4.0])
    rounds.append([1.0, 3.0, 90.0])
    found = in_turn(rounds)
    assert [each / found[0] for each in found] == pytest.approx([1, 3, 4])


def test_a_layer_that_has_nothing_to_do_in_a_backward_pass_takes_nothing_there():
    class Bare(Said):
        def durations(self):
            return {a: s for a, s in super().durations().items() if (a.stage, a.kind) != (0, "B")}

    layers = times_of([Bare(2, 4)], [4], 2, Whole(1, 4)).of_layers(0.0)
    assert layers[0] == {"F": {4: 4.0}, "B": {4: 0.0}, "R": {4: 0.0}}
    assert layers[1]["B"] == pytest.approx({4: 8})
