"""Options that contradict themselves are errors when they are made."""

import dataclasses
import pathlib

import pytest
import tensorflow as tf
from lingvo.core import hyperparams

from pipemesh import recurrent
from pipemesh.errors import PipelineError
from pipemesh.layers.pipeline.pipelining_params import define_pipelining
from pipemesh.recurrent import LossScale, Options, Selective
from pipemesh.recurrent.table.forms import ROLL_ABOVE
from pipemesh.recurrent.watch.health import CHECKS


def test_all_texts_say_from_which_size_on_there_are_loops():
    told = f"more than {ROLL_ABOVE:,} nodes"
    assert told in " ".join(str(Options.__doc__).split())
    p = hyperparams.Params()
    define_pipelining(p)
    assert told in p._params["rolled"]._description
    readme = pathlib.Path(recurrent.__file__).with_name("README.md").read_text(encoding="utf-8")
    assert told in " ".join(readme.split())


@pytest.fixture
def loss_scale():
    return LossScale(tf.constant(8.0), tf.constant(0), tf.constant(True))


def test_the_defaults_change_no_results():
    options = Options()
    assert (options.batch_dim, options.remat, options.rolled) == (0, "full", None)
    assert options.compute_dtype is None and options.loss_scale is None
    assert options.uncast_inputs == frozenset()
    assert not options.strict_devices


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
