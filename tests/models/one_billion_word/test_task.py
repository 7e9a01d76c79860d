"""The task, its configurations and its layers, also under lingvo's own trainer."""

import contextlib
import json
import math
import re
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from lingvo import datasets, model_registry
from lingvo.core import optimizer, py_utils, schedule, tshape

from models.one_billion_word.choice import choose, default_figures
from models.one_billion_word.named_transformer import (
    ExpertsBlock,
    ExpertsEmbedding,
    NamedBlock,
    NamedEmbedding,
    NamedSoftmax,
)
from models.one_billion_word.params import (
    CONFIGURATIONS,
    OneBillionWordGPipe32,
    OneBillionWordTiny,
    boundaries_of,
    layer_flops_of,
)
from models.one_billion_word.sizes import LAYERS
from models.one_billion_word.transformer import Block, Embedding, Softmax, sinusoids
from pipemesh.layers.named import by_logical_name
from pipemesh.plan import Plan, predict
from tests.layers.harness import cluster
from tests.models.one_billion_word.language_model import (
    BATCH_SIZE,
    SMALL,
    TIME,
    Training,
    pipelined,
    random_batch,
    small,
)
from tests.warm import warm

BATCH = random_batch()


# No clipping: lingvo takes the norm of the plain embedding's gradient before the rows of one token
# are added up, so the plain model is clipped by another factor. Sessions draw another dropout.
CALM = {"CLIP_GRADIENT_NORM": 0.0, "DROPOUT_PROB": 0.0}


@pytest.mark.slow
def test_a_session_trains_as_the_plain_model_does_eagerly(eagerly):
    training = Training(small(**CALM, PIPELINED=False, PLAN=Plan()))

    def values():
        return {name: variable.numpy() for name, variable in training.state.items()}

    initial, losses, final = values(), [training.step(BATCH) for _ in range(3)], values()
    py_utils.SetEagerMode(False, test_mode=True)
    with tf.Graph().as_default(), cluster(2):
        step = py_utils.GetOrCreateGlobalStepVar()
        config = small(**CALM, PLAN=Plan("layers:2", num_microbatches=2))
        task = pipelined(config).Instantiate()
        variables = by_logical_name(task, task.vars.Flatten())
        batch = py_utils.NestedMap({name: tf.constant(v) for name, v in BATCH.items()})
        with py_utils.GlobalStepContext(step):
            scores, _ = task.FPropTower(task.theta, batch)
            _, update, _ = task.learners[0].Apply(scores, task.vars)
        with tf.control_dependencies([update]):
            train = step.assign_add(1)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for name, variable in variables.items():
                variable.load(initial[name], session)
            for loss in losses:
                np.testing.assert_allclose(session.run(scores.loss[0]), loss, rtol=1e-5)
                session.run(train)
            found = session.run(variables)
    assert len(found) == 37
    for name, value in found.items():
        np.testing.assert_allclose(value, final[name], rtol=1e-3, atol=2e-5, err_msg=name)


TRAINER = """
import json
import runpy
import sys
import time
from models.one_billion_word.params import OneBillionWordTiny
from pipemesh.plan import Plan

for name, value in json.loads(sys.argv.pop(1)).items():
    setattr(OneBillionWordTiny, name, Plan.from_text(value) if name == "PLAN" else value)
# lingvo's runners wait for each other for half a minute, whether there is need to or not.
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.5))
runpy.run_module("pipemesh.layers.lingvo_trainer", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def lingvos_trainer(cache_dir, tmp_path_factory):
    """Runs lingvo's trainer in a process of its own, always with one log directory."""
    logdir = tmp_path_factory.mktemp("lingvo")

    def run(*flags, plan="mesh=layers:2 num_microbatches=2", folder=logdir):
        sizes = {**SMALL, "VOCAB_SIZE": 600, "PLAN": plan, "CACHE_DIR": cache_dir}
        common = [
            "--run_locally=cpu",
            "--model=models.one_billion_word.params.OneBillionWordTiny",
            f"--logdir={folder}",
            "--model_params_override=train.max_steps:3",
        ]
        program = warm("-c", TRAINER, json.dumps(sizes))
        done = subprocess.run(
            [*program, *common, *flags], capture_output=True, text=True, timeout=280
        )
        return done, logdir

    return run


@pytest.fixture(scope="module")
def trained(lingvos_trainer):
    """Three steps with a stage on each of two CPU devices."""
    return lingvos_trainer(
        "--mode=sync", "--job=controller,trainer_client", "--worker_split_size=2"
    )


def assert_trained(done):
    assert done.returncode == 0, done.stderr[-3000:]
    steps = re.findall(r"step: +(\d+), .* loss:(\S+)", done.stderr)
    assert [int(step) for step, _ in steps] == [1, 2, 3]
    # The logarithm of 600 pieces is what a model that knows nothing pays.
    assert all(abs(float(loss) - math.log(600)) < 1 for _, loss in steps)


@pytest.mark.slow
def test_the_registered_model_trains_under_lingvos_trainer_on_two_devices(trained):
    """lingvo gives a local worker one CPU device, and ends in an AssertionError with two stages."""
    done, logdir = trained
    assert_trained(done)
    assert (logdir / "train" / "ckpt-00000003.index").exists()
    assert re.search(r"InitDevices .*device:CPU:0'.*device:CPU:1'\]", done.stderr)


@pytest.mark.exhaustive
def test_it_trains_under_lingvos_trainer_split_over_three_axes(lingvos_trainer, tmp_path):
    plan = (
        "mesh=layers:2;data:2;model:2 layout=batch:data;heads:model;d_ff:model;vocab:model "
        "num_microbatches=2"
    )
    flags = ["--mode=sync", "--job=controller,trainer_client", "--worker_split_size=8"]
    assert_trained(lingvos_trainer(*flags, plan=plan, folder=tmp_path)[0])
    names = {name for name, _ in tf.train.list_variables(str(tmp_path / "train"))}
    assert any("table_slice_1" in name for name in names)


@pytest.mark.slow
def test_lingvos_evaler_finds_the_held_out_text(trained, lingvos_trainer):
    assert trained[0].returncode == 0
    done, logdir = lingvos_trainer("--mode=sync", "--job=evaler_heldout", "--worker_split_size=2")
    assert done.returncode == 0, done.stderr[-3000:]
    (scores,) = (logdir / "eval_heldout").glob("score-*.txt")
    assert re.search(r"loss: \d", scores.read_text())
    graph = (logdir / "eval_heldout" / "eval_heldout.pbtxt").read_text()
    graph = graph[: graph.index("library {")]
    call = re.compile(r'name: "[^"]*action_\d+F\d+/(Stateful)?PartitionedCall"')
    actions = [node for node in graph.split("node {") if call.search(node)]
    devices = [re.findall(r'device: "[^"]*(CPU:\d)"', node)[-1] for node in actions]
    assert sorted(devices) == ["CPU:0"] * 2 + ["CPU:1"] * 2, "two stages, two microbatches"


def test_lingvos_decoder_says_why_it_does_not_work():
    """It ran, and wrote nothing."""
    with pytest.raises(NotImplementedError, match="LanguageModel is no decoder job of lingvo's"):
        OneBillionWordTiny().Task().cls.Decode(None, None)


def test_only_texts_are_data_sets_of_lingvo():
    assert datasets.GetDatasets(OneBillionWordTiny) == ["Dev", "Heldout", "Test", "Train"]


def test_the_inference_graph_scores_any_number_of_rows():
    """It was empty, without a word."""
    config = small()
    py_utils.SetEagerMode(False, test_mode=True)
    rows = {name: values[:3] for name, values in BATCH.items()}
    with tf.Graph().as_default(), cluster(1, do_eval=True):
        py_utils.GetOrCreateGlobalStepVar()
        p = pipelined(config)
        p.input = config.Heldout()
        task = p.Instantiate()
        fetches, feeds = task.Inference()["default"]
        expected = task.ComputePredictions(
            task.theta, py_utils.NestedMap({k: tf.constant(v) for k, v in rows.items()})
        )
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            found, expected = session.run(
                [fetches, expected], {feeds[name]: values for name, values in rows.items()}
            )
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    assert found.xent.shape == rows["ids"].shape


@pytest.mark.exhaustive
def test_lingvos_trainer_writes_the_inference_graph(lingvos_trainer):
    done, logdir = lingvos_trainer("--mode=write_inference_graph")
    assert done.returncode == 0, done.stderr[-3000:]
    text = (logdir / "inference_graphs" / "inference.pbtxt").read_text()
    assert all(f'"{name}"' in text for name in ("xent", "loss", *BATCH))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_configuration_is_registered(name):
    key = f"models.one_billion_word.params.{name}"
    assert issubclass(model_registry.GetClass(key), CONFIGURATIONS[name])
    for dataset in ("Train", "Dev", "Test"):
        params = model_registry.GetParams(key, dataset)
        assert params.input.heldout == (dataset != "Train")
        assert params.task.name == "language_model"


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_stages_hold_every_layer_once_and_in_order(name, layers):
    config = CONFIGURATIONS[name]()
    config.LAYERS = layers
    stack = config.Task().stack
    assert len(stack.cell_tpl) == config.PLAN.num_stages
    assert config.BATCH_SIZE % stack.num_micro_batches == 0
    layers = [layer for cell in stack.cell_tpl for layer in cell.sub]
    first, block, last = {
        "lingvo": (Embedding, Block, Softmax),
        "named": (
            (ExpertsEmbedding, ExpertsBlock, NamedSoftmax)
            if config.NUM_EXPERTS
            else (NamedEmbedding, NamedBlock, NamedSoftmax)
        ),
    }[config.LAYERS]
    assert [layer.cls for layer in layers] == [first, *[block] * config.NUM_LAYERS, last]
    assert [layer.name for layer in layers] == [f"cell_{i:03d}" for i in range(len(layers))]


def test_gpipe32_is_what_its_name_promises():
    config = OneBillionWordGPipe32()
    task = config.Task()
    cells = task.stack.cell_tpl
    assert [sum(layer.cls is NamedBlock for layer in cell.sub) for cell in cells] == [8, 8, 8, 8]
    assert task.stack.num_micro_batches == 32
    assert (config.BATCH_SIZE, config.SEQUENCE_LENGTH) == (32, 1024)
    embedding, block, softmax = cells[0].sub[0], cells[2].sub[3], cells[3].sub[-1]
    assert (embedding.vocab_size, embedding.embedding_dim) == (32_000, 2048)
    assert (softmax.vocab_size, softmax.input_dim) == (32_000, 2048)
    assert (block.input_dim, block.hidden_dim, block.num_heads) == (2048, 8192, 16)
    assert embedding.dropout_rate == block.dropout_rate == 0.1
    learner = task.train.learner
    assert learner.optimizer.cls is optimizer.Adam
    assert learner.lr_schedule.cls is schedule.TransformerSchedule
    assert learner.lr_schedule.warmup_steps == 40_000
    assert learner.lr_schedule.model_dim == 2048
    params = config.Train()
    assert (params.vocab_size, params.sequence_length, params.batch_size) == (32_000, 1024, 32)


def test_weights_are_frozen_by_filters_of_the_learner():
    config = OneBillionWordTiny()
    config.FREEZE, config.TRAIN_ONLY = "cell_00[01]/", "w_"
    learner = config.Task().train.learner
    filters = learner.bprop_variable_exclusion, learner.bprop_variable_filter
    assert filters == (config.FREEZE, config.TRAIN_ONLY)


@pytest.mark.parametrize(
    ("mesh", "sizes"), [("layers:2;model:4,1", (6, 1)), ("layers:2;model:1,4", (2, 5))]
)
def test_a_home_with_more_devices_takes_more_of_the_layers(mesh, sizes):
    config = CONFIGURATIONS["OneBillionWordTiny"]()
    config.PLAN = Plan(mesh, "heads:model;d_ff:model;vocab:model", num_microbatches=8)
    cells = config.Task().stack.cell_tpl
    assert sum(len(cell.sub) for cell in cells) == 7
    assert [len(cell.sub) for cell in cells] == list(sizes)


def test_what_is_chosen_counts_on_the_devices_of_each_home():
    """Four times the flops on four times the devices take as long, so nobody waits for long."""
    config = CONFIGURATIONS["OneBillionWordTiny"]()
    config.CHOSEN, flops = (), [4e14 / 3] * 3 + [1e14 / 4] * 4
    bubbles = []
    for mesh in ("layers:2;model:4,1", "layers:2;model:4"):
        config.PLAN = Plan(mesh, "heads:model;d_ff:model", num_microbatches=8, remat="none")
        bubbles.append(choose(config, flops, (0, 3, 7), "GPU", None).bubble)
    assert bubbles[0] == pytest.approx(1 / 9, abs=1e-3) and bubbles[1] > 0.3


def test_the_choice_is_the_fastest_forecast_that_fits():
    config = CONFIGURATIONS["OneBillionWordBase"]()
    flops, cuts, available = layer_flops_of(config), boundaries_of(config), 10**9
    choice = choose(config, flops, cuts, "CPU", available)
    figures = default_figures(config, flops, "CPU")

    def forecast(number, remat):
        plan = Plan(config.PLAN.mesh, num_microbatches=number, remat=remat, boundaries=cuts)
        return predict(plan, figures, config.BATCH_SIZE)

    every = [forecast(2**n, remat) for n in range(7) for remat in ("none", "full")]
    fitting = [each for each in every if max(each.memory) <= available]
    best = min(fitting, key=lambda each: each.seconds)
    assert 0 < len(fitting) < len(every)
    assert dict(best.plan.changes(choice.plan)).keys() == {"boundaries"}
    assert (choice.memory, choice.bubble) == (int(max(best.memory)), best.bubble)


def test_one_program_may_split_the_softmax_along_the_stages():
    config = CONFIGURATIONS["OneBillionWordTiny"]()
    config.NUM_LAYERS = 4
    config.CHOSEN = ("num_microbatches",)
    config.PLAN = Plan("layers:2", "vocab:layers", "gpipe", 8, lowering="simd")
    cuts = boundaries_of(config)
    choice = choose(config, layer_flops_of(config), cuts, "CPU", None)
    assert choice.plan.lowering == "simd" and choice.plan.layout == config.PLAN.layout
    assert choice.plan.num_microbatches > 1 and choice.plan.boundaries is None
    # Only what was free is named, with memory in a unit that fits.
    told = (
        rf"{choice.plan.num_microbatches} microbatches: bubble \d+%, about [\d.]+ [KMG]iB a device"
    )
    assert re.match(told, str(choice))


@contextlib.contextmanager
def eager_mode(do_eval):
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        with cluster(2, do_eval):
            py_utils.GetOrCreateGlobalStepVar().assign(3)
            yield
    finally:
        py_utils.SetEagerMode(False, test_mode=True)


@pytest.fixture(scope="module")
def losses():
    """The nats of every token [batch, time], with dropout, in two stages on two devices."""
    with eager_mode(do_eval=False):
        task = small(PLAN=Plan("layers:2", num_microbatches=4)).Task().Instantiate()

        @tf.function(autograph=False)
        def xent(batch):
            return task.ComputePredictions(task.theta, py_utils.NestedMap(batch)).xent

        yield lambda batch: xent({k: tf.constant(v) for k, v in batch.items()}).numpy()


def changed(batch, where):
    """The batch with other tokens read at `where`, bool [batch, time]."""
    ids = np.where(where, (batch["ids"] + 7) % 40, batch["ids"])
    return {**batch, "ids": ids.astype(np.int32)}


@pytest.mark.slow
def test_no_token_sees_what_comes_after_it_or_is_of_another_sentence_or_row(losses):
    batch = random_batch()
    one_segment = {**batch, "segment_ids": np.ones([BATCH_SIZE, TIME], np.int32)}
    row = np.broadcast_to(np.arange(BATCH_SIZE)[:, None] == 5, [BATCH_SIZE, TIME])
    later = [np.arange(TIME) >= first for first in (1, 7, TIME - 1)]
    for given, wheres in (
        (batch, [row, *(batch["segment_ids"] == segment for segment in (1, 2, 4))]),
        (one_segment, [np.broadcast_to(where, [BATCH_SIZE, TIME]) for where in later]),
    ):
        before = losses(given)
        for where in wheres:
            after = losses(changed(given, where))
            np.testing.assert_array_equal(after[~where], before[~where])
            assert (after[where] != before[where]).all()


def test_sinusoids_restart_with_the_segment():
    positions = np.array([[0, 1, 2, 0, 1, 0]], np.int32)
    encoded = sinusoids(tf.constant(positions), 8).numpy()[0]
    np.testing.assert_array_equal(encoded[0], [0, 0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(encoded[3], encoded[0])
    np.testing.assert_array_equal(encoded[4], encoded[1])
    np.testing.assert_allclose(encoded[2][0], np.sin(2), rtol=1e-6)
    np.testing.assert_allclose(encoded[2][3], np.sin(2e-4), rtol=1e-5)
    np.testing.assert_allclose(encoded[2][7], np.cos(2e-4), rtol=1e-6)


def test_the_embedding_adds_positions_of_the_segment():
    p = Embedding.Params().Set(name="embedding", vocab_size=5, model_dim=8)
    with eager_mode(do_eval=True):
        layer = p.Instantiate()
        ids = tf.constant([[3, 3, 3, 3]])
        rest = [tf.zeros([1, 4])] * 3
        hidden, *_ = layer.FPropDefaultTheta(ids, *rest, tf.constant([[0, 1, 0, 1]]))
    hidden = hidden.numpy()[0]
    np.testing.assert_array_equal(hidden[:2], hidden[2:])
    assert (hidden[0] != hidden[1]).any()


# Batch, time, model, hidden and vocabulary sizes.
B, T, D, H, V = 2, 5, 8, 12, 30


@pytest.mark.parametrize(
    ("params", "flops"),
    [
        # Scale, position, sum and dropout of each number.
        (Embedding.Params().Set(vocab_size=V, model_dim=D), 4 * B * T * D),
        (
            Block.Params().Set(model_dim=D, hidden_dim=H, num_heads=2),
            # A multiplication and an addition in each cell of: query, key, value and output
            # projection; logits and their weighted sum; and the two feed-forward projections.
            2 * (4 * B * T * D * D + 2 * B * T * T * D + 2 * B * T * D * H),
        ),
        # The projection, and five operations a logit for bias and cross entropy.
        (Softmax.Params().Set(vocab_size=V, model_dim=D), 2 * B * T * D * V + 5 * B * T * V),
    ],
)
def test_flops_equal_a_count_by_hand(params, flops):
    ids = tshape.Shape([B, T])
    first = ids if params.cls is Embedding else tshape.Shape([B, T, D])
    meta = params.cls.FPropMeta(params, first, ids, ids, ids, ids)
    assert meta.flops == flops
    shapes = [shape.ToTensorShape().as_list() for shape in meta.out_shapes]
    if params.cls is Softmax:
        assert shapes == [[], [], [B, T]]
    else:
        assert shapes == [[B, T, D], [B, T], [B, T], [B, T], [B, T]]
