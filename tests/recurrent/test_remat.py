"""Which microbatches of a stage, and which of its layers, are computed again."""

import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.partition import LayerCost
from pipemesh.plan import Figures, Plan, Remat
from pipemesh.plan.figures import figures_of_costs
from pipemesh.plan.stages import stages_of
from pipemesh.recurrent import REMAT_POLICIES, ByStage, Selective
from pipemesh.recurrent.circular.alike_pipeline import check_options
from pipemesh.recurrent.options import Options
from pipemesh.recurrent.remat import FULL, NONE, modes_of, policy_of, remat_of
from pipemesh.schedule import Schedule, forward_only, gpipe, one_f_one_b, recompute, zb_h1
from tests.recurrent.passes.traced import traced_stage, two_layers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("text", [*REMAT_POLICIES, "twice,except_last"])
def test_a_plans_value_is_the_policy_of_its_text(text):
    schedule, value = one_f_one_b(2, 3), Remat.from_text(text)
    assert modes_of(value, schedule) == modes_of(text, schedule)
    assert remat_of(value) == remat_of(text) == value
    assert Options(remat=value).remat is value


def test_only_python_knows_a_custom_policy():
    policy = Selective(bool)
    assert policy_of(policy) is policy and remat_of(policy) == Remat.CUSTOM
    with pytest.raises(PipelineError, match="remat is 'custom'; allowed are full"):
        policy_of(Remat.CUSTOM)


@pytest.mark.parametrize("remat", ["full", "full,full", Remat.FULL])
def test_a_loop_over_ticks_computes_all_again(remat):
    check_options(Options(remat=remat))
    with pytest.raises(PipelineError, match="remat"):
        check_options(Options(remat="full,none"))


@pytest.mark.parametrize("remat", ["last", None, bool, ["full"], "full,", "full,last"])
def test_no_policy_is_an_error_that_says_what_is_allowed(remat):
    told = "allowed are full, none, except_last, twice, one of them for each stage"
    with pytest.raises(PipelineError, match=told):
        policy_of(remat)


@pytest.mark.parametrize(
    ("schedule", "kept"),
    [
        # Backward goes from the last microbatch in GPipe, from each at once in 1F1B's last stage.
        (gpipe(2, 3), {(0, 2), (1, 2)}),
        (one_f_one_b(2, 4), {(1, 0), (1, 1), (1, 2), (1, 3)}),
        # The first half of a backward pass starts it.
        (zb_h1(2, 4), {(1, 0), (1, 1), (1, 2), (1, 3)}),
        (forward_only(2, 3), set()),
    ],
    ids=["gpipe", "1f1b", "zb_h1", "forward_only"],
)
def test_except_last_keeps_where_backward_follows_at_once(schedule, kept):
    found = policy_of("except_last").modes(schedule)
    assert {pair for pair, mode in found.items() if mode is NONE} == kept
    pairs = {(s, m) for s in range(2) for m in range(schedule.num_microbatches)}
    assert {pair for pair, mode in found.items() if mode is FULL} == pairs - kept


def selective(predicate):
    """The one mode of a selective policy."""
    (mode,) = set(Selective(predicate).modes(gpipe(2, 3)).values())
    return mode


def test_selective_computes_the_nodes_of_picked_layers_again():
    with tf.Graph().as_default():
        traced = traced_stage(two_layers)
    again = selective(lambda layer: layer == "second").recomputed(traced)
    assert set(traced.layers.values()) == {"first", "second"}
    for node, layer in traced.layers.items():
        assert again(node) == (layer == "second"), node
    assert not again("of no layer")


def test_a_stage_without_layers_has_none_to_pick():
    def forward(theta, carry, inputs, microbatch, step):
        return [tf.matmul(inputs[0], theta[0])], carry

    with tf.Graph().as_default():
        traced = traced_stage(forward)
    with pytest.raises(PipelineError, match=r"stage 's' has no layers .*layer_scope"):
        selective(bool).recomputed(traced)


@pytest.mark.parametrize(
    "remat", ["twice,none", ByStage(["twice", "none"])], ids=["text", "policy"]
)
def test_each_stage_may_have_a_policy_of_its_own(remat):
    found = modes_of(remat, one_f_one_b(2, 3))
    assert {pair: mode.name for pair, mode in found.items()} == {
        (s, m): ("twice", "none")[s] for s in range(2) for m in range(3)
    }
    with pytest.raises(PipelineError, match=r"has 2 policies, .*but .* 3 stages"):
        modes_of(remat, one_f_one_b(3, 3))


@pytest.mark.parametrize("remat", ["none", "twice", Selective(bool)])
def test_an_R_of_the_schedule_overrides_the_policy(remat):
    schedule = recompute(one_f_one_b(2, 3), stages=[0])
    found = modes_of(remat, schedule)
    assert {pair for pair, mode in found.items() if mode.is_apart} == schedule.recomputed()
    assert all(found[pair].backward is NONE for pair in schedule.recomputed())
    picked = {mode.recomputed for mode in found.values() if mode.is_apart}
    named = remat if isinstance(remat, Selective) else "full"
    assert picked == {modes_of(named, one_f_one_b(2, 3))[0, 0].recomputed}
    assert {m.name for m in found.values() if not m.is_apart} == {
        remat if isinstance(remat, str) else "selective"
    }


@pytest.mark.parametrize(
    "remat", [*REMAT_POLICIES, "full,full", "full,none", "none,twice", "except_last,full"]
)
@pytest.mark.parametrize(
    "schedule",
    [
        gpipe(2, 3),
        one_f_one_b(2, 4),
        zb_h1(2, 4),
        Schedule.from_text("0F0 0F1 0R0 0B0 0B1\n1F0 1B0 1F1 1B1"),
    ],
    ids=["gpipe", "1f1b", "zb_h1", "with R"],
)
def test_forecasts_compute_again_what_the_executor_does(schedule, remat):
    """The same stages and microbatches, and in the same `W`."""
    costs = [LayerCost(forward=1.0)] * 2
    figures = Figures(tuple(figures_of_costs(costs, 1)))
    number = schedule.num_microbatches
    plan = Plan("layers:2", schedule=schedule, num_microbatches=number, remat=remat)
    stages = stages_of(plan, figures, number)
    modes = modes_of(remat, schedule)
    again = {pair for pair, mode in modes.items() if mode.recomputed is not NONE.recomputed}
    assert stages.run.recomputed() == again
    assert stages.twice == {stage for (stage, _), mode in modes.items() if mode.is_twice}
