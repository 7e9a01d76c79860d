"""Checkpoints that `lingvo.core.gpipe` wrote go on here, under any partition."""

import json
import re
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import builder_layers, gpipe, py_utils, tshape

from pipemesh import layers as ours
from pipemesh.backend.saved_state import Slice, SlicedVariable
from pipemesh.checkpoint import Checkpoints
from pipemesh.errors import PartitionError, PipelineError
from pipemesh.layers import (
    export_to_lingvo,
    import_from_lingvo,
    lingvo_checkpoint_rules,
    lingvo_names,
)
from pipemesh.layers.lingvo_stages import boundaries_in
from tests.layers import lingvo_checkpoint_process as model
from tests.layers.harness import cluster
from tests.warm import warm

SHAPE = tshape.Shape([model.BATCH, model.WIDTH])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What lingvo has written, in a process of its own, and how it went on."""
    found = {}

    def get(kind):
        if kind not in found:
            (found[kind],) = run_lingvo(tmp_path_factory.mktemp(kind), f"{kind}:2:")
        return found[kind]

    return get


def run_lingvo(folder, *jobs):
    """Jobs of `lingvo_checkpoint_process`."""
    result = subprocess.run(
        warm("-m", model.__name__, str(folder), *jobs),
        check=True,
        timeout=200,
        capture_output=True,
        text=True,
    )
    return [json.loads(line) for line in result.stdout.splitlines()[-len(jobs) :]]


def stages_of(kind, number):
    if kind == "automatic":
        return model.automatic(ours.PartitionSequentialLayers, number)
    return model.by_hand(ours.FeatureExtractionLayer.Params)


def restored_and_trained(params, restore, save=None):
    """Losses of a graph whose variables `restore` has filled; trains as much again after `save`."""
    py_utils.SetEagerMode(False, test_mode=True)
    with tf.Graph().as_default(), cluster(len(params.cell_tpl)):
        step = py_utils.GetOrCreateGlobalStepVar()
        layer = params.Instantiate()
        loss, train_step = model.loss_and_step(layer, step)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            restore(session, layer, tf.compat.v1.global_variables())
            found, losses = session.run(step), model.train(session, loss, train_step)
            if save is None:
                return found, losses
            save(session, tf.compat.v1.global_variables())
            return found, losses, model.train(session, loss, train_step)


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


@pytest.mark.parametrize(("kind", "numbers"), [("automatic", (1, 4)), ("by_hand", (2,))])
@pytest.mark.slow
def test_training_goes_from_lingvo_here_and_back(written, tmp_path, kind, numbers):
    """What lingvo saved trains on here; what is saved here its saver restores, and it trains on."""
    theirs, given = written(kind), None if kind == "automatic" else model.stages_of(kind, 2)
    mine, later = str(tmp_path / "ours" / "ckpt-3"), str(tmp_path / "ours" / "ckpt-6")
    import_from_lingvo(theirs["path"], mine, given)
    step, losses, last = restored_and_trained(
        model.stack(ours.PipeliningLayer.Params, stages_of(kind, 4)),
        lambda session, _, all_of: tf.compat.v1.train.Saver(all_of).restore(session, mine),
        lambda session, all_of: tf.compat.v1.train.Saver(all_of).save(session, later),
    )
    assert step == model.NUM_STEPS
    assert losses == pytest.approx(theirs["losses"], rel=1e-4)

    jobs = []
    for number in numbers:
        path = str(tmp_path / f"{number}" / "ckpt-00000006")
        export_to_lingvo(later, path, model.stages_of(kind, number))
        jobs.append((path, f"{kind}:{number}:{path}"))
    saved = tensors(later)
    assert {name.rpartition("/")[2] for name in saved} >= {"Adam", "Adam_1", "var", "global_step"}
    assert any(name.endswith("/ExponentialMovingAverage") for name in saved)
    for (path, _), found in zip(
        jobs, run_lingvo(tmp_path / "lingvo", *(job for _, job in jobs)), strict=True
    ):
        assert found["losses"] == pytest.approx(last, rel=1e-4)
        # Saved by lingvo as it had restored it; and what comes back from there is what was here.
        assert_same(tensors(found["path"]), tensors(path))
        back = f"{path}-back"
        import_from_lingvo(found["path"], back, given)
        assert_same(tensors(back), saved)


def tensors(path):
    reader = tf.train.load_checkpoint(path)
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_weights_in_slices_are_whole_in_an_export_without_a_place_in_data(tmp_path):
    """lingvo's saver, and `lingvo.trainer`, which looks for the newest, find what they ask for."""
    halves = [tf.Variable([[1.0, 2.0]]), tf.Variable([[3.0, 4.0]])]
    parts = [(half, Slice((2, 2), (row, 0))) for row, half in enumerate(halves)]
    state = {
        "lm/cell_003/w/var": SlicedVariable(parts),
        "global_step": tf.Variable(300, dtype=tf.int64),
        "data/batches": iter(tf.data.Dataset.range(9)),
    }
    path = Checkpoints(str(tmp_path), state).save(300, {"plan": "p"})
    theirs = str(tmp_path / "theirs" / "train" / "ckpt-00000300")
    told = export_to_lingvo(path, theirs, (0, 3, 7))
    assert told == f"{theirs}: 2 tensors of {path}"
    assert tf.train.latest_checkpoint(str(tmp_path / "theirs" / "train")) == theirs
    expected = {"lm/d1/cell_003/w/var": np.array([[1, 2], [3, 4]]), "global_step": np.array(300)}
    assert_same(tensors(theirs), expected)


def test_an_export_has_the_stages_of_a_checkpoint_that_lingvo_wrote(tmp_path):
    """lingvo leaves the first of four stages for four alike layers empty, which nobody guesses."""
    cut = gpipe.PartitionSequentialLayers([model.dense() for _ in range(4)], 4, SHAPE)
    py_utils.SetEagerMode(False, test_mode=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        py_utils.GetOrCreateGlobalStepVar()
        model.stack(gpipe.PipeliningLayer.Params, cut).Instantiate()
        tf.Variable(7, name="counter")
        session.run(tf.compat.v1.global_variables_initializer())
        like = tf.compat.v1.train.Saver().save(session, str(tmp_path / "like" / "ckpt-00000000"))
    assert boundaries_in(name for name, _ in tf.train.list_variables(like)) == [0, 0, 1, 2, 4]
    mine = str(tmp_path / "ours")
    import_from_lingvo(like, mine)
    path = str(tmp_path / "theirs")
    export_to_lingvo(mine, path, like=like)
    assert_same(tensors(path), tensors(like))
    with pytest.raises(PipelineError, match="neither stages nor like is given"):
        export_to_lingvo(mine, path)
    with pytest.raises(PipelineError, match=r"no variable lies in a stage .*give the stages"):
        export_to_lingvo(mine, path, like=mine)


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
