"""A small language model to test with, trained as `trainer.Trainer` does it."""

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from models.one_billion_word.params import OneBillionWordTiny
from pipemesh.backend.complete_graphs import place_beside_inputs
from pipemesh.layers import mesh_cluster
from pipemesh.layers.named import by_logical_name
from pipemesh.training import prepare_optimizer

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


def small(**attributes):
    config = OneBillionWordTiny()
    for name, value in {**SMALL, **attributes}.items():
        setattr(config, name, value)
    return config


def pipelined(config):
    p = config.Task()
    if config.OPTIMIZER != "sgd":
        # The gradient of the keys' bias is nothing but round-off: a softmax does not see a shift of
        # its logits. With the usual epsilon Adam takes a full step along it.
        p.train.learner.optimizer.epsilon = 1e-4
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
