"""A small language model to test with, run as `trainer.Trainer` runs it or in a TF1 session."""

import dataclasses

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from models.one_billion_word.params import OneBillionWordTiny, layers_of
from models.one_billion_word.trainer import prepare_optimizer
from pipemesh.layers import FeatureExtractionLayer, SeqLayer, mesh_cluster
from pipemesh.layers.partition_layers import named_layers
from tests.layers.harness import cluster

BATCH_SIZE = 8
TIME = 16
VOCAB_SIZE = 40
SEED = 5
SMALL = {
    "VOCAB_SIZE": VOCAB_SIZE,
    "MODEL_DIM": 16,
    "HIDDEN_DIM": 32,
    "NUM_LAYERS": 2,
    "NUM_HEADS": 2,
    "SEQUENCE_LENGTH": TIME,
    "BATCH_SIZE": BATCH_SIZE,
    "WARMUP_STEPS": 2,
}


@dataclasses.dataclass
class Result:
    """What a run computed; gradients and weights are keyed by variable name."""

    loss: float
    xent: np.ndarray
    grads: dict[str, np.ndarray]
    initial: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]

    def assert_close(self, other):
        np.testing.assert_allclose(self.loss, other.loss, rtol=1e-5)
        np.testing.assert_allclose(self.xent, other.xent, rtol=1e-4, atol=1e-5)
        for part in ("initial", "grads", "weights"):
            mine, theirs = getattr(self, part), getattr(other, part)
            assert mine.keys() == theirs.keys()
            for name, value in mine.items():
                np.testing.assert_allclose(
                    value, theirs[name], rtol=1e-3, atol=2e-5, err_msg=f"{part} {name}"
                )


def small(**attributes):
    config = OneBillionWordTiny()
    for name, value in {**SMALL, **attributes}.items():
        setattr(config, name, value)
    return config


def pipelined(config):
    p = config.Task()
    # The gradient of the keys' bias is nothing but round-off: a softmax does not see a shift of
    # its logits. With the usual epsilon Adam takes a full step along it.
    p.train.learner.optimizer.epsilon = 1e-4
    return p


def plain(config):
    """The same model without a pipeline."""
    p = pipelined(config)
    stage = FeatureExtractionLayer.Params().Set(name="plain", sub=named_layers(layers_of(config)))
    p.stack = SeqLayer.Params().Set(cell_tpl=[stage])
    return p


def random_batch(seed=0):
    """Rows of four sentences of four tokens each."""
    rng = np.random.default_rng(seed)
    shape = (BATCH_SIZE, TIME)
    column = np.arange(TIME, dtype=np.int32)
    return {
        "ids": rng.integers(3, VOCAB_SIZE, shape, dtype=np.int32),
        "labels": rng.integers(3, VOCAB_SIZE, shape, dtype=np.int32),
        "segment_ids": np.broadcast_to(column // 4 + 1, shape),
        "segment_pos": np.broadcast_to(column % 4, shape),
        "weights": rng.integers(0, 2, shape).astype(np.float32),
    }


def run_tf2(task_params, batch, *, steps=3, num_devices=1):
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        with cluster(num_devices):
            step = py_utils.GetOrCreateGlobalStepVar()
            step.assign(0)
            tf.random.set_seed(SEED)
            task = task_params.Instantiate()
            variables = task.vars.Flatten()
            prepare_optimizer(task.learners[0], variables, step)
            tensors = py_utils.NestedMap({k: tf.constant(v) for k, v in batch.items()})

            def train_step():
                seen = []

                def note(var_grads):
                    # As computed: lingvo clips and applies them after this.
                    seen.extend(tf.convert_to_tensor(grad) for _, grad in var_grads.Flatten())
                    return var_grads

                with py_utils.GradientTape(), py_utils.GlobalStepContext(step):
                    scores, outputs = task.FPropTower(task.theta, tensors)
                    task.learners[0].Apply(scores, task.vars, gradient_adjuster=note)
                step.assign_add(1)
                return scores.loss[0], outputs.xent, seen

            initial = {v.name: v.numpy() for v in variables}
            train_step = tf.function(train_step, autograph=False)
            loss, xent, grads = train_step()
            for _ in range(1, steps):
                train_step()
            return Result(
                loss.numpy(),
                xent.numpy(),
                {v.name: g.numpy() for v, g in zip(variables, grads, strict=True)},
                initial,
                {v.name: v.numpy() for v in variables},
            )
    finally:
        py_utils.SetEagerMode(False, test_mode=True)


def losses(config, batches):
    """The loss of a step on each batch, as the configuration's plan runs it."""
    plan = config.PLAN
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        with mesh_cluster(plan.mesh, layout=plan.layout, lowering=plan.lowering):
            step = py_utils.GetOrCreateGlobalStepVar()
            step.assign(0)
            tf.random.set_seed(SEED)
            task = pipelined(config).Instantiate()
            prepare_optimizer(task.learners[0], task.vars.Flatten(), step)

            @tf.function(autograph=False)
            def train_step(batch):
                with py_utils.GradientTape(), py_utils.GlobalStepContext(step):
                    scores, _ = task.FPropTower(task.theta, py_utils.NestedMap(batch))
                    task.learners[0].Apply(scores, task.vars)
                step.assign_add(1)
                return scores.loss[0]

            return [float(train_step(batch)) for batch in batches]
    finally:
        py_utils.SetEagerMode(False, test_mode=True)


def run_tf1(task_params, batch, *, weights, steps=3, num_devices=1):
    py_utils.SetEagerMode(False, test_mode=True)
    with tf.Graph().as_default(), cluster(num_devices):
        step = py_utils.GetOrCreateGlobalStepVar()
        task = task_params.Instantiate()
        variables = {v.name: v for v in task.vars.Flatten()}
        tensors = py_utils.NestedMap({k: tf.constant(v) for k, v in batch.items()})
        grads = {}

        def note(var_grads):
            grads.update({v.name: tf.convert_to_tensor(g) for v, g in var_grads.Flatten()})
            return var_grads

        with py_utils.GlobalStepContext(step):
            scores, outputs = task.FPropTower(task.theta, tensors)
            _, update, _ = task.learners[0].Apply(scores, task.vars, gradient_adjuster=note)
        with tf.control_dependencies([update]):
            train = step.assign_add(1)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for name, variable in variables.items():
                variable.load(weights[name], session)
            loss, xent, grads = session.run([scores.loss[0], outputs.xent, grads])
            for _ in range(steps):
                session.run(train)
            final = session.run(variables)
        return Result(loss, xent, grads, weights, final)
