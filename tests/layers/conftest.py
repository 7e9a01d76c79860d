"""Fixtures of the layer tests."""

import pytest

from tests.layers.harness import run_tf1, run_tf2

# The tests in which a TF1 graph can differ from TF2: gradients of loops and of what crosses stages,
# random numbers of steps, names of variables, errors while the graph runs. All others run in TF2;
# in TF1 they are `exhaustive`.
IN_BOTH_MODES = {
    "test_a_layer_of_before_tpl_and_one_of_a_stage_may_have_one_name",
    "test_a_schedule_as_a_loop",
    "test_a_weight_tied_across_first_and_last_stage_is_one_variable",
    "test_an_output_that_is_not_finite_is_an_error",
    "test_fetched_activations_cross_stages_and_carry_gradients",
    "test_none_keeps_its_place_and_integers_their_type",
}


def pytest_generate_tests(metafunc):
    named = set()
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0]
        named |= set(names.replace(" ", "").split(",") if isinstance(names, str) else names)
    if "run" not in metafunc.fixturenames or "run" in named:
        return
    in_both = metafunc.function.__name__ in IN_BOTH_MODES
    tf1 = pytest.param(run_tf1, marks=() if in_both else pytest.mark.exhaustive)
    metafunc.parametrize("run", [tf1, run_tf2], ids=["tf1", "tf2"], indirect=True)


@pytest.fixture
def run(request):
    return request.param
