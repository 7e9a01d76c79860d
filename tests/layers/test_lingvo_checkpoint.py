"""Checkpoints that `lingvo.core.gpipe` wrote go on here, under any partition."""

import json
import re
import subprocess

import pytest
import tensorflow as tf
from lingvo.core import builder_layers, gpipe, py_utils, tshape

from pipemesh import layers as ours
from pipemesh.errors import PartitionError, PipelineError
from pipemesh.layers import lingvo_checkpoint_rules, lingvo_names
from tests.layers import lingvo_checkpoint_process as model
from tests.layers.harness import cluster
from tests.warm import warm


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What lingvo has written, in a process of its own, and how it went on."""
    found = {}

    def get(kind):
        if kind not in found:
            folder = str(tmp_path_factory.mktemp(kind))
            result = subprocess.run(
                warm("-m", model.__name__, folder, kind),
                check=True,
                timeout=200,
                capture_output=True,
                text=True,
            )
            found[kind] = json.loads(result.stdout.splitlines()[-1])
        return found[kind]

    return get


def stages_of(kind, number):
    if kind == "automatic":
        return model.automatic(ours.PartitionSequentialLayers, number)
    return model.by_hand(ours.FeatureExtractionLayer.Params)


def restored_and_trained(params, restore):
    """Losses of a graph whose variables `restore` has filled."""
    py_utils.SetEagerMode(False, test_mode=True)
    with tf.Graph().as_default(), cluster(len(params.cell_tpl)):
        step = py_utils.GetOrCreateGlobalStepVar()
        layer = params.Instantiate()
        loss, train_step = model.loss_and_step(layer, step)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            restore(session, layer, tf.compat.v1.global_variables())
            return session.run(step), model.train(session, loss, train_step)


CASES = [("automatic", 1), ("automatic", 2), ("automatic", 4), ("by_hand", 2)]


@pytest.mark.parametrize(("kind", "number"), CASES)
@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_of_lingvo_by_rules(written, kind, number):
    """With the optimizer's state and the step, through what lingvo.trainer restores by."""
    stages = stages_of(kind, number)
    rules = lingvo_checkpoint_rules(
        written(kind)["path"], None if kind == "automatic" else stages_of(kind, number)
    )

    def restore(session, layer, variables):
        del layer
        py_utils.OverrideVarsFromCheckpoints(variables, rules)(session)

    step, losses = restored_and_trained(model.stack(ours.PipeliningLayer.Params, stages), restore)
    assert step == model.NUM_STEPS
    assert losses == pytest.approx(written(kind)["losses"], rel=1e-4)


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_weights_of_a_checkpoint_of_lingvo_are_restored_by_name(written, kind, number):
    params = model.stack(ours.PipeliningLayer.Params, stages_of(kind, number))
    path = written(kind)["path"]

    def restore(session, layer, variables):
        del variables
        tf.compat.v1.train.Saver(lingvo_names(layer, path)).restore(session, path)

    _, losses = restored_and_trained(params, restore)
    expected = written(kind)["losses"][0]
    assert losses[0] == pytest.approx(expected, rel=1e-4)
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        with cluster(len(params.cell_tpl)):
            py_utils.GetOrCreateGlobalStepVar()
            layer = params.Instantiate()
            tf.compat.v1.train.Saver(lingvo_names(layer, path)).restore(None, path)
            outputs = layer.FPropDefaultTheta(model.inputs())
    finally:
        py_utils.SetEagerMode(False, test_mode=True)
    assert float(tf.reduce_sum(tf.square(outputs - 0.5))) == pytest.approx(expected, rel=1e-4)


def sequential(*names):
    return builder_layers.SequentialLayer.Params().Set(
        name="sequence", sub=[model.dense(name) for name in names]
    )


def variable_names(params):
    py_utils.SetEagerMode(False, test_mode=True)
    with tf.Graph().as_default():
        layer = params.Instantiate()
        plain = {v.name.removesuffix(":0") for v in layer.vars.Flatten()}
        return plain, set(lingvo_names(layer))


SHAPE = tshape.Shape([model.BATCH, model.WIDTH])
NAMED = {
    "a list": lambda lib: model.automatic(lib.PartitionSequentialLayers, 2),
    "a sequence": lambda lib: lib.PartitionSequentialLayers(
        sequential("a", "b", "c", "d").Set(repeat=2), 4, SHAPE
    ),
    "a list of sequences": lambda lib: lib.PartitionSequentialLayers(
        [sequential("a", "b"), sequential("a", "b"), model.dense()], 2, SHAPE
    ),
    "by hand, layers of one name": lambda lib: model.by_hand(lib.FeatureExtractionLayer.Params),
    "by hand, nested": lambda lib: [
        lib.FeatureExtractionLayer.Params().Set(
            name="outer", sub=model.by_hand(lib.FeatureExtractionLayer.Params)
        ),
        lib.FeatureExtractionLayer.Params().Set(
            name="prefixed", variable_name_prefix="p_", sub=[model.dense("block")]
        ),
    ],
    "a bare layer": lambda lib: [
        model.dense("block"),
        lib.FeatureExtractionLayer.Params().Set(name="stage", sub=[model.dense("block")]),
    ],
}


@pytest.mark.parametrize("case", NAMED)
def test_the_names_are_those_of_lingvo(case):
    theirs, _ = variable_names(model.stack(gpipe.PipeliningLayer.Params, NAMED[case](gpipe)))
    plain, named = variable_names(model.stack(ours.PipeliningLayer.Params, NAMED[case](ours)))

    def any_cut(names):
        """lingvo cuts elsewhere."""
        return {re.sub(r"^d\d/", "d/", name) for name in names}

    assert any_cut(named) == any_cut(theirs)
    if case.startswith("a list"):
        assert all(name.startswith("cell_00") for name in plain)


def test_a_sequence_in_a_list_is_one_layer_as_in_lingvo():
    params = [sequential("a", "b"), sequential("c", "d")]
    assert [
        [sub.sub[0].name for sub in stage.sub]
        for stage in ours.PartitionSequentialLayers(params, 2, SHAPE)
    ] == [["a"], ["c"]]
    with pytest.raises(PartitionError, match=r"num_stages is 4, but 2 layers.*SequentialLay"):
        ours.PartitionSequentialLayers(params, 4, SHAPE)
    whole = builder_layers.SequentialLayer.Params().Set(name="whole", sub=params)
    stages = ours.PartitionSequentialLayers(whole, 4, SHAPE)
    assert [[sub.name for sub in stage.sub] for stage in stages] == [
        [f"cell_{i:03d}"] for i in range(4)
    ]


def saved(tmp_path, *names):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = {name: tf.Variable([1.0], name=name) for name in names}
        session.run(tf.compat.v1.global_variables_initializer())
        return tf.compat.v1.train.Saver(variables).save(session, str(tmp_path / "ckpt"))


def test_what_is_no_checkpoint_of_lingvo_is_an_error(tmp_path):
    path = saved(tmp_path, "cell_000/w/var", "cell_001/w/var")
    with pytest.raises(PipelineError, match=r"no variable lies in a stage.*'cell_000/w/var'"):
        lingvo_checkpoint_rules(path)
    path = saved(tmp_path, "d0/cell_000/w/var", "d1/cell_000/w/var")
    with pytest.raises(PipelineError, match=r"would both be 'cell_000/w/var'.*stages="):
        lingvo_checkpoint_rules(path)
    params = model.stack(ours.PipeliningLayer.Params, stages_of("automatic", 1))
    with tf.Graph().as_default():
        layer = params.Instantiate()
        with pytest.raises(PipelineError, match=r"no variable is 'cell_000/b/var'.*it has d0/cell"):
            lingvo_names(layer, path)
        path = saved(tmp_path, "a/cell_000/b/var", "b/cell_000/b/var")
        with pytest.raises(PipelineError, match=r"several variables may be 'cell_000/b/var'"):
            lingvo_names(layer, path)
