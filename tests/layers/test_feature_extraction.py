"""Names of layers and weights in stages."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer, SeqLayer
from pipemesh.layers.feature_extraction import Place, random_names_of, scopes_of
from tests.layers.blocks import WIDTH, Block
from tests.layers.harness import executing, run_eagerly, run_tf1, run_tf2

pytestmark = pytest.mark.gpu

X = np.random.default_rng(0).normal(size=[8, 3, WIDTH]).astype(np.float32)


def stage(name, sub, **kwargs):
    return FeatureExtractionLayer.Params().Set(name=name, sub=sub, **kwargs)


def block(name):
    return Block.Params().Set(name=name)


def stack(cells, cls=PipeliningLayer, **kwargs):
    if cls is PipeliningLayer:
        kwargs.setdefault("num_micro_batches", 4)
    return cls.Params().Set(name="stack", cell_tpl=cells, **kwargs)


CASES = {
    "two stages": (
        [stage("s0", [block("block")]), stage("s1", [block("block")])],
        {"s0/block", "s1/block"},
    ),
    "only the layers that need it": (
        [stage("s0", [block("first"), block("block")]), stage("s1", [block("block")])],
        {"first", "s0/block", "s1/block"},
    ),
    "stages in a stage": (
        [stage("s0", [stage("a", [block("x")]), stage("b", [block("x")])]), stage("s1", [])],
        {"a/x", "b/x"},
    ),
    "a stage in a stage": (
        [stage("s0", [stage("a", [block("x")]), block("y")]), stage("s1", [block("x")])],
        {"a/x", "y", "x"},
    ),
    "stages of one name in two stages": (
        [stage("s0", [stage("a", [block("x")])]), stage("s1", [stage("a", [block("x")])])],
        {"s0/a/x", "s1/a/x"},
    ),
    "a bare cell": ([block("block"), stage("s1", [block("block")])], {"block", "s1/block"}),
    "a prefix": (
        [
            stage("s0", [block("x")], variable_name_prefix="p_"),
            stage("s1", [block("x")], variable_name_prefix="p_"),
            stage("s2", [block("x")]),
        ],
        {"s0/p_x", "s1/p_x", "x"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_of_one_name_have_weights_of_their_own(case):
    """In TF2 they were one weight; a graph refused the second variable."""
    cells, names = CASES[case]
    with executing(True):
        found = stack(cells).Instantiate().vars.Flatten()
    assert {v.name for v in found} == {f"{name}/w/var:0" for name in names}
    assert len(found) == len(set(map(id, found)))


@pytest.mark.parametrize(
    ("run", "case"),
    [
        (run_tf1, "two stages"),
        (run_tf2, "stages of one name in two stages"),
    ],
)
def test_layers_of_one_name_have_gradients_and_masks_of_their_own(run, case):
    """Some had one mask."""
    cells, names = CASES[case]
    result = run(stack(cells), [X], num_devices=len(cells))
    grads = list(result.grads.values())
    assert len(grads) == len(names)
    assert all(not np.allclose(a, b) for i, a in enumerate(grads) for b in grads[:i])
    result.assert_close(run(stack(cells, SeqLayer), [X]), rtol=1e-4, atol=1e-5)


def test_a_layer_of_before_tpl_and_one_of_a_stage_may_have_one_name(run):
    cells = [stage("s0", [block("block")])]
    result = run(stack(cells, before_tpl=[block("block")]), [X])
    assert set(result.grads) == {"block/w/var:0", "s0/block/w/var:0"}


@pytest.mark.parametrize(("nested", "prefix"), [(False, ""), (True, "p_")])
def test_layers_of_one_name_have_masks_of_their_own(nested, prefix):
    def dropout(name):
        layer = layers.DropoutLayer.Params().Set(name="dropout", keep_prob=0.5)
        return stage(name, [layer], variable_name_prefix=prefix)

    cells = [dropout("a"), dropout("b")]
    params = stack([stage("s0", cells)] if nested else cells, num_micro_batches=2)
    (y,) = run_eagerly(params, [np.ones([8, 3, 64], np.float32)], loss=None).outputs
    assert 0.2 < np.mean(y > 0) < 0.3, "two independent masks keep a quarter"


def test_scopes_are_the_shortest_that_tell_apart():
    scopes = {
        Place(("s0",), "a"): (),
        Place(("s0", "n"), "b"): ("s0", "n"),
        Place(("s1", "n"), "b"): ("s1", "n"),
        Place(("s1", "m"), "b"): ("m",),
        Place(("s1", "m"), "a"): ("m",),
        Place(("s2",), "tied", scope_is_given=True): (),
        Place(("s3",), "tied"): (),
    }
    assert scopes_of([*scopes]) == [*scopes.values()]
    assert random_names_of([*scopes]) == ["a", "b", "b#1", "b#2", "a#1", "tied", "tied#1"]


class Task(base_layer.BaseLayer):
    """A stack and something beside it."""

    @classmethod
    def Params(cls):
        p = super().Params().Set(name="task")
        p.Define("first", None, "")
        p.Define("second", None, "")
        return p

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("first", self.params.first)
        self.CreateChild("second", self.params.second)

    def FProp(self, theta, x):
        return self.second.FProp(theta.second, self.first.FProp(theta.first, x))


ONE = stack([stage("s0", [block("block")])])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ONE, block("block")),
        (block("block"), ONE),
        (ONE.Copy().Set(name="encoder"), ONE.Copy().Set(name="decoder")),
    ],
)
def test_a_weight_shared_with_a_layer_beside_the_stack_by_chance_is_an_error(first, second):
    params = Task.Params().Set(first=first, second=second)
    with pytest.raises(PipelineError, match=r"'task/block/w/var:0'.* give one of the layers ano"):
        run_tf2(params, [X])


def test_two_models_of_one_program_share_their_weights_as_always(eagerly):
    """As training and evaluation do in lingvo's executor."""
    params = Task.Params().Set(first=ONE, second=block("other"))
    with py_utils.VariableStore():
        py_utils.GetOrCreateGlobalStepVar()
        models = [params.Instantiate() for _ in range(2)]
        for model in models:
            model.FPropDefaultTheta(tf.constant(X))
        one, other = (model.vars.Flatten() for model in models)
        assert all(a is b for a, b in zip(one, other, strict=True))
