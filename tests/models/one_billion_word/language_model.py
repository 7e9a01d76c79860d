"""A small language model to test with, run as `trainer.Trainer` runs it or in a TF1 session."""

import dataclasses

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from models.one_billion_word.params import OneBillionWordTiny, layers_of
from pipemesh.backend.devices import place_beside_inputs
from pipemesh.layers import FeatureExtractionLayer, SeqLayer, mesh_cluster
from pipemesh.layers.named import by_logical_name
from pipemesh.layers.partition_layers import named_layers
from pipemesh.training import prepare_optimizer
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


class Training:
    """A model and its optimizer, trained step by step as the configuration's plan runs it.

    To be made and called in lingvo's eager mode.

    Attributes:
        state: what a checkpoint is to have.
    """

    def __init__(self, config):
        plan = config.PLAN
        self._cluster = lambda: mesh_cluster(plan.mesh, layout=plan.layout, lowering=plan.lowering)
        self._is_one_program = plan.lowering == "simd"
        # Not lingvo's own, which there is one of.
        self._number = tf.Variable(0, dtype=tf.int64, trainable=False)
        with self._cluster():
            tf.random.set_seed(SEED)
            self._task = pipelined(config).Instantiate()
            self._learner = self._task.learners[0]
            prepare_optimizer(self._learner, self._task.vars.Flatten(), self._number)
        variables = self._task.vars.Flatten()
        slots = self._learner.optimizer._optimizer.variables()
        self.state = {
            "global_step": self._number,
            **by_logical_name(self._task, variables),
            **by_logical_name(self._task, slots),
        }
        self._step = tf.function(self._train_step, autograph=False)

    def step(self, batch):
        """Trains on a batch; returns the loss before."""
        with self._cluster():
            return float(self._step(batch))

    def _train_step(self, batch):
        with py_utils.GradientTape(), py_utils.GlobalStepContext(self._number):
            scores, _ = self._task.FPropTower(self._task.theta, py_utils.NestedMap(batch))
            self._learner.Apply(scores, self._task.vars)
        self._number.assign_add(1)
        if self._is_one_program:
            place_beside_inputs(tf.compat.v1.get_default_graph())
        return scores.loss[0]


def losses(config, batches):
    """The loss of a step on each batch, as the configuration's plan runs it."""
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        training = Training(config)
        return [training.step(batch) for batch in batches]
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
