"""Models and checkpoints of `lingvo.core.gpipe`."""

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
from pipemesh.layers.lingvo_gpipe import boundaries_in, with_stages, without_stages
from tests.layers import lingvo_checkpoint_process as model
from tests.layers.harness import executing
from tests.warm import warm

SHAPE = tshape.Shape([model.BATCH, model.WIDTH])
NAMES = ["lm/cell_002/w/var", "lm/cell_003/ff/w/var/Adam_1", "lm/softmax/w/var", "global_step"]


def test_names_get_the_stage_of_their_layer():
    expected = [
        "lm/d0/cell_002/w/var",
        "lm/d1/cell_003/ff/w/var/Adam_1",
        "lm/softmax/w/var",
        "global_step",
    ]
    names = with_stages(NAMES, (0, 3, 4))
    assert list(names.values()) == expected
    assert list(without_stages(expected).values()) == NAMES
    # Those of another partition, and a stage without layers, as lingvo may make one.
    assert list(with_stages(expected, [0, 1, 1, 4]).values())[:2] == [
        "lm/d2/cell_002/w/var",
        "lm/d2/cell_003/ff/w/var/Adam_1",
    ]


@pytest.mark.parametrize("boundaries", [[0, 3, 4], [0, 1], [0, 0, 2, 2, 5], [0, 1, 2, 3]])
def test_boundaries_are_read_from_names_as_they_were_put_in(boundaries):
    """Empty stages are read too, but for a last one, which no name shows."""
    names = [f"lm/cell_{layer:03d}/w/var" for layer in range(boundaries[-1])]
    assert boundaries_in(reversed(with_stages(names, boundaries).values())) == boundaries


@pytest.mark.parametrize(
    ("names", "stages", "told"),
    [
        (NAMES, (0, 3), "'lm/cell_003/ff/w/var/Adam_1' is of layer 3, but the stages have 3 layer"),
        (NAMES, (1, 4), r"stages=\[1, 4\] are no boundaries; they begin with 0 and rise"),
        (NAMES, (0, 4, 3), "are no boundaries"),
        (NAMES, (), "are no boundaries"),
        (NAMES, 2, r"stages=\[2\] are no boundaries"),
        (["lm/w/var"], (0, 3), "no variable lies in a layer .such as cell_000.*'lm/w/var'.*params"),
        (["cell_000/w", "d0/cell_000/w"], (0, 1), "would both be 'd0/cell_000/w'"),
    ],
)
def test_stages_that_do_not_fit_are_an_error(names, stages, told):
    with pytest.raises(PipelineError, match=told):
        with_stages(names, stages)


# In a process of its own: modules stay replaced.
PROGRAM = """
from pipemesh.backend.devices import start_cpu_devices

start_cpu_devices(2)

import numpy as np
import pytest
from absl import flags
from lingvo.core import gpipe

from pipemesh.errors import PipelineError, PlanError
from pipemesh.layers import PipeliningLayer, replace_gpipe
from pipemesh.training import registered

flags.FLAGS.mark_as_parsed()
theirs = gpipe.PipeliningLayer
with pytest.raises(PlanError, match=r"m has the PipeliningLayer of lingvo.*replace_gpipe\\(\\)"):
    registered._plan_of(theirs.Params(), "m", {"mesh": "layers:2"}, False)
with pytest.raises(PlanError, match=r"m has the PipeliningLayer of lingvo.*replace_gpipe\\(\\)"):
    registered._plan_of(theirs.Params(), "m", {"schedule": "1f1b"}, False)

sub = type("Early", (theirs,), {"__module__": "early"})
with pytest.raises(PipelineError, match=r"early is imported already, .* before you import it"):
    replace_gpipe()
del sub
import gc
gc.collect()
replace_gpipe()
replace_gpipe()
assert gpipe.PipeliningLayer is PipeliningLayer

import lingvo.compat as tf
from lingvo.core import base_layer, batch_major_attention, layers_with_gpipe, py_utils
from lingvo.tasks.lm import layers
from tests.layers.harness import run_tf1

assert batch_major_attention.gpipe.PipeliningLayer is PipeliningLayer


class Whole(base_layer.BaseLayer):
    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("child", None, "")
        p.Define("call", None, "")
        return p

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("child", self.params.child)

    def FProp(self, theta, *inputs):
        return self.params.call(self.child, theta.child, *inputs)


def lm(pipelined):
    p = layers.GPipeTransformerLm.CommonParams(
        vocab_size=32, model_dim=8, hidden_dim=16, num_heads=2, num_layers=2, num_shards=1,
        splits=2, num_micro_batches=2, residual_dropout_prob=0.1)
    p.stack.pipelined = pipelined

    def call(lm, theta, ids, paddings):
        labels = py_utils.NestedMap(class_ids=ids, class_weights=1 - paddings)
        found, _ = lm.FProp(theta, ids, paddings, labels=labels)
        return found.total_xent, found.logits

    return Whole.Params().Set(name="whole", child=p, call=call)


def transformer(pipelined):
    p = layers_with_gpipe.GPipeTransformerStack.Params().Set(
        model_dim=4, num_encoder_layers=1, num_decoder_layers=1, splits=2,
        num_micro_batches=2 if pipelined else 1)
    p.emb_tpl.Set(input_dropout_prob=0.3).token_emb.Set(vocab_size=7, embedding_dim=4)
    p.emb_tpl.position_emb.embedding_dim = 4
    p.softmax_tpl.Set(num_classes=7, input_dim=4)
    for tpl in (p.encoder_tpl, p.decoder_tpl):
        tpl.source_dim = 4
        tpl.tr_atten_tpl.Set(
            num_attention_heads=2, residual_dropout_prob=0.3, atten_dropout_prob=0.3)
        tpl.tr_fflayer_tpl.Set(hidden_dim=6, residual_dropout_prob=0.3, relu_dropout_prob=0.3)

    def call(stack, theta, source, target, paddings, weights):
        return stack.FProp(
            theta, source, paddings[:3], target, paddings, labels=target, label_weights=weights)

    return Whole.Params().Set(name="whole", child=p, call=call)


rng = np.random.default_rng(0)
ids = rng.integers(0, 32, [4, 5]).astype(np.int32)
paddings = np.array([[0, 0, 0, 0, n % 2] for n in range(4)], np.float32)
source, target = (rng.integers(0, 7, [length, 8]).astype(np.int32) for length in (3, 4))
zeros = np.zeros([4, 8], np.float32)
for model, inputs, loss, rtol in (
    (lm, [ids, paddings], lambda y: y[0], 2e-5),
    (transformer, [source, target, zeros, 1 - zeros], lambda y: tf.reduce_sum(y[0]), 1e-4),
):
    wanted, found = [
        run_tf1(model(pipelined), inputs, num_devices=2, loss=loss) for pipelined in (False, True)
    ]
    assert len(found.grads) > 20
    found.assert_close(wanted, rtol=rtol, atol=1e-5)
print("equal")
"""


@pytest.mark.slow
def test_lingvos_own_models_run_on_pipemesh():
    done = subprocess.run(
        warm("-c", PROGRAM), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]


def run_lingvo(folder, *jobs):
    """Jobs of `lingvo_checkpoint_process`."""
    command = warm("-m", model.__name__, str(folder), *jobs)
    done = subprocess.run(command, check=True, timeout=200, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()[-len(jobs) :]]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """By the kind of stages what lingvo has written, in a process of its own, and went on to."""
    jobs = ["automatic:2:", "by_hand:2:"]
    return dict(zip(KINDS, run_lingvo(tmp_path_factory.mktemp("lingvo"), *jobs), strict=True))


KINDS = ["automatic", "by_hand"]


def stages_of(kind, number):
    if kind == "automatic":
        return model.automatic(ours.PartitionSequentialLayers, number)
    return model.by_hand(ours.FeatureExtractionLayer.Params)


def restored_and_trained(params, restore, save=None):
    """Losses of a graph whose variables `restore` has filled; trains as much again after `save`."""
    with executing(False, len(params.cell_tpl)) as step:
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


@pytest.mark.parametrize(("kind", "number"), [("automatic", 1), ("by_hand", 2)])
@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint_of_lingvo_by_rules(written, kind, number):
    """With the optimizer's state and the step, through what lingvo.trainer restores by."""
    stages = stages_of(kind, number)
    given = None if kind == "automatic" else stages
    rules = lingvo_checkpoint_rules(written[kind]["path"], given)

    def restore(session, layer, variables):
        del layer
        py_utils.OverrideVarsFromCheckpoints(variables, rules)(session)

    step, losses = restored_and_trained(model.stack(ours.PipeliningLayer.Params, stages), restore)
    assert step == model.NUM_STEPS
    assert losses == pytest.approx(written[kind]["losses"], rel=1e-4)


@pytest.mark.parametrize(("kind", "number"), [("automatic", 4), ("by_hand", 2)])
def test_weights_of_a_checkpoint_of_lingvo_are_restored_by_name(written, kind, number):
    params = model.stack(ours.PipeliningLayer.Params, stages_of(kind, number))
    path = written[kind]["path"]

    def restore(session, layer, variables):
        del variables
        tf.compat.v1.train.Saver(lingvo_names(layer, path)).restore(session, path)

    _, losses = restored_and_trained(params, restore)
    expected = written[kind]["losses"][0]
    assert losses[0] == pytest.approx(expected, rel=1e-4)
    with executing(True, len(params.cell_tpl)):
        layer = params.Instantiate()
        tf.compat.v1.train.Saver(lingvo_names(layer, path)).restore(None, path)
        outputs = layer.FPropDefaultTheta(model.inputs())
    assert float(tf.reduce_sum(tf.square(outputs - 0.5))) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_training_goes_from_lingvo_here_and_back(written, tmp_path):
    """What lingvo saved trains on here; what is saved here its saver restores, and it trains on."""
    jobs, exported, goes_on = [], [], []
    for kind, number in zip(KINDS, (4, 2), strict=True):
        given = None if kind == "automatic" else model.stages_of(kind, 2)
        mine, later = str(tmp_path / kind / "ckpt-3"), str(tmp_path / kind / "ckpt-6")
        import_from_lingvo(written[kind]["path"], mine, given)
        step, losses, last = restored_and_trained(
            model.stack(ours.PipeliningLayer.Params, stages_of(kind, 4)),
            lambda session, _, all_of, path=mine: tf.compat.v1.train.Saver(all_of).restore(
                session, path
            ),
            lambda session, all_of, path=later: tf.compat.v1.train.Saver(all_of).save(
                session, path
            ),
        )
        assert step == model.NUM_STEPS
        assert losses == pytest.approx(written[kind]["losses"], rel=1e-4)
        saved = tensors(later)
        kinds = {name.rpartition("/")[2] for name in saved}
        assert kinds >= {"Adam", "Adam_1", "var", "ExponentialMovingAverage", "global_step"}
        path = str(tmp_path / f"{kind}_theirs" / "ckpt-00000006")
        export_to_lingvo(later, path, model.stages_of(kind, number))
        jobs.append(f"{kind}:{number}:{path}")
        exported.append((path, given, saved))
        goes_on.append(last)
    found = run_lingvo(tmp_path / "lingvo", *jobs)
    for theirs, (path, given, saved), last in zip(found, exported, goes_on, strict=True):
        assert theirs["losses"] == pytest.approx(last, rel=1e-4)
        # Saved by lingvo as it had restored it; and what comes back from there is what was here.
        assert_same(tensors(theirs["path"]), tensors(path))
        import_from_lingvo(theirs["path"], f"{path}-back", given)
        assert_same(tensors(f"{path}-back"), saved)


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
    with executing(False), tf.compat.v1.Session() as session:
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
    with executing(False):
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
