"""Options that contradict themselves are errors when they are made."""

import dataclasses
import pathlib

import pytest
import tensorflow as tf

from pipemesh import recurrent
from pipemesh.errors import PipelineError
from pipemesh.recurrent import LossScale, Options, Selective
from pipemesh.recurrent.table.run import LOOP_ABOVE, LOOP_LARGE_ACTIONS_ABOVE
from pipemesh.recurrent.watch.health import CHECKS


@pytest.mark.parametrize("nodes", [LOOP_ABOVE, LOOP_LARGE_ACTIONS_ABOVE])
def test_texts_say_from_which_size_on_there_is_a_loop(nodes):
    readme = pathlib.Path(recurrent.__file__).with_name("README.md").read_text(encoding="utf-8")
    for text in (str(Options.__doc__), readme):
        assert f"more than {nodes:,}" in " ".join(text.split())


@pytest.fixture
def loss_scale():
    return LossScale(tf.constant(8.0), tf.constant(0), tf.constant(True))


def test_the_defaults_change_no_results():
    options = Options()
    assert (options.batch_dim, options.remat, options.loop) == (0, "full", None)
    assert options.compute_dtype is None and options.loss_scale is None
    assert options.uncast_inputs == frozenset()
    assert not options.strict_devices


@pytest.mark.parametrize(("rolled", "loop"), [(False, False), (True, True), ("ticks", True)])
def test_the_old_name_of_loop_is_taken_with_a_warning(rolled, loop):
    with pytest.warns(FutureWarning, match=f"old name of an option; use loop={loop}") as warned:
        options = Options(rolled=rolled)
    assert options.loop is loop
    assert warned[0].filename == __file__
    # A copy is not asked for the old name.
    assert dataclasses.replace(options, batch_dim=1).loop is loop


def test_wrong_values_of_loop_are_errors():
    with pytest.raises(PipelineError, match=r"loop='ticks' is invalid\. Use True, False, or None"):
        Options(loop="ticks")
    with pytest.raises(PipelineError, match=r"rolled='yes' is invalid\. Use loop=True"):
        Options(rolled="yes")
    with pytest.raises(PipelineError, match=r"rolled=True and loop=False were given\. Use loop"):
        Options(rolled=True, loop=False)


def test_gradients_are_checked_unless_their_overflow_is_expected(loss_scale):
    assert Options().check_numerics == "results"
    assert Options(loss_scale=loss_scale).check_numerics == "loss"


@pytest.mark.parametrize("policy", CHECKS)
def test_a_loss_scale_and_a_check_of_gradients_exclude_each_other(policy, loss_scale):
    assert Options(check_numerics=policy).check_numerics == policy
    if policy in ("all", "results"):
        with pytest.raises(PipelineError, match=f"check_numerics is '{policy}', but a loss_scale"):
            Options(check_numerics=policy, loss_scale=loss_scale)
    else:
        options = Options(check_numerics=policy, loss_scale=loss_scale)
        assert options.check_numerics == policy


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"check_numerics": "some"}, "check_numerics is 'some'; allowed are all, forward"),
        ({"remat": "some"}, "remat is 'some'; allowed are full, none, except_last"),
        ({"compute_dtype": "int32"}, "int32"),
        ({"compute_dtype": tf.float64}, "float64"),
    ],
)
def test_what_there_is_not_is_an_error_that_names_it(given, text):
    with pytest.raises(PipelineError, match=text):
        Options(**given)


@pytest.mark.parametrize("dtype", ["bfloat16", tf.bfloat16])
def test_a_dtype_may_be_named(dtype):
    assert Options(compute_dtype=dtype).compute_dtype == tf.bfloat16


def test_another_one_is_made_of_one_and_checked_again(loss_scale):
    remat = Selective(bool)
    options = dataclasses.replace(Options(batch_dim=1), remat=remat)
    assert options.remat is remat and options.batch_dim == 1
    with pytest.raises(PipelineError, match="but a loss_scale makes"):
        dataclasses.replace(Options(), loss_scale=loss_scale)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.batch_dim = 0
