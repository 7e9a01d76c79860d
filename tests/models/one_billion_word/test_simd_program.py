"""Loss and gradients of the language model as the program of a core: for TPUs, and run on CPUs."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.layers import mesh_cluster
from pipemesh.layers.step_seed import whole_batch_randomness
from pipemesh.lowering import Cores, PlacementLowering, Tensor, ops
from pipemesh.plan import Plan
from tests.lowering.legalize import legalize, not_lowered, numbers_after
from tests.models.one_billion_word.language_model import (
    SEED,
    losses,
    pipelined,
    random_batch,
    small,
)

INPUTS = ("ids", "labels", "weights", "segment_ids", "segment_pos")
# The norm that gradients are clipped to, and the rate of the steps along them.
NORM, RATE = 0.3, 1.0
RULES = "batch:data;heads:model;{};vocab:model"
LAYERS_GROUPS = [[i, i + 4] for i in range(4)]
DATA_GROUPS = [[i, i + 2] for i in (0, 1, 4, 5)]
MODEL_GROUPS = [[i, i + 1] for i in range(0, 8, 2)]
LAYERS_AND_MODEL_GROUPS = [[0, 1, 4, 5], [2, 3, 6, 7]]
MODELS = {
    "dense": {},
    "tied": {"TIED_EMBEDDINGS": True},
    "experts": {"NUM_EXPERTS": 4, "HIDDEN_DIM": 16},
}


class CoreProgram:
    """Embedding, blocks in a loop over ticks, loss, and clipped gradients.

    Attributes:
        plan: of the model.
        rules: of the program's lowering.
        shapes: of all whole weights by name.
        weights: their values, for each core a list.
    """

    def __init__(self, model):
        rules = RULES.format("experts:model" if model == "experts" else "d_ff:model")
        self.plan = Plan("layers:2;data:2;model:2", rules, "gpipe", 2, lowering="simd")
        config = config_of(model, PLAN=self.plan)
        py_utils.SetEagerMode(True, test_mode=True)
        try:
            with self._cluster():
                py_utils.GetOrCreateGlobalStepVar().assign(0)
                tf.random.set_seed(SEED)
                stack = pipelined(config).Instantiate().stack
                self._simd = stack.simd
                self.rules, self.shapes = stack.simd.rules, stack.simd.shapes
                devices = [f"CPU:{i}" for i in range(self.plan.mesh.num_devices)]
                lowering = PlacementLowering(self.plan.mesh, self.rules, devices)
                weights = stack.simd.weights(lowering, stack.theta)
        finally:
            py_utils.SetEagerMode(False, test_mode=True)
        assert weights.keys() == self.shapes.keys()
        self.weights = [
            [weights[name].slices[core] for name in self.shapes] for core in range(len(devices))
        ]

    def _cluster(self):
        return mesh_cluster(self.plan.mesh, layout=self.plan.layout, lowering="simd")

    def args(self, core, step=0):
        """Step, inputs and weights."""
        inputs = [tf.constant(random_batch(step)[name]) for name in INPUTS]
        return [tf.constant(step, tf.int64), *inputs, *self.weights[core]]

    def specs(self):
        return [tf.TensorSpec.from_tensor(arg) for arg in self.args(0)]

    def __call__(self, core, step, *given):
        inputs, weights = given[: len(INPUTS)], list(given[len(INPUTS) :])
        with self._cluster(), tf.GradientTape() as tape:
            tape.watch(weights)
            with whole_batch_randomness(step):
                loss, total, _ = self._simd(core, self._named(core, weights), inputs, step)
            mean = loss / total
        grads = [tf.convert_to_tensor(g) for g in tape.gradient(mean.slices[0], weights)]
        squares = [ops.reduce_sum(grad * grad) for grad in self._named(core, grads).values()]
        norm = tf.sqrt(tf.add_n([square.slices[0] for square in squares]))
        scale = NORM / tf.maximum(norm, NORM)
        return ops.export_tensor(mean), [grad * scale for grad in grads]

    def _named(self, core, slices):
        pairs = zip(self.shapes.items(), slices, strict=True)
        return {name: Tensor(core, (part,), shape) for (name, shape), part in pairs}


def config_of(model, **options):
    return small(NUM_HEADS=4, DROPOUT_PROB=0.1, **MODELS[model], **options)


program_of = functools.cache(CoreProgram)


def only(model):
    """All models, of which one runs by default."""
    marks = pytest.mark.exhaustive
    return [name if name == model else pytest.param(name, marks=marks) for name in MODELS]


@functools.cache
def text(model="dense"):
    program = program_of(model)
    return legalize(program, program.plan.mesh, program.rules, *program.specs())


# Two models take turns; they differ in their blocks alone.
@pytest.mark.parametrize("model", only("dense"))
def test_no_operation_stays_but_the_two_loops(model):
    assert not not_lowered(text(model))
    assert text(model).count('"tf.While"') == 2


def test_sums_have_the_groups_of_their_axes():
    found = collections.Counter(map(str, numbers_after("replica_groups", text())))
    wanted = LAYERS_GROUPS, DATA_GROUPS, MODEL_GROUPS, LAYERS_AND_MODEL_GROUPS
    assert set(found) == set(map(str, wanted))
    # Loss, number of tokens, and once for each weight of which replicas have copies.
    assert found[str(DATA_GROUPS)] == 2 + len(program_of("dense").shapes)


def test_gradients_of_replicas_are_summed_once_and_not_each_tick():
    bodies = [part for part in text().split("func.func") if "while" in part.split("(")[0]]
    assert len(bodies) == 4
    groups = [found for body in bodies for found in numbers_after("replica_groups", body)]
    # Each block's two halves end in a sum over `model`; nothing else goes around inside.
    assert groups and all(found == MODEL_GROUPS for found in groups)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", only("dense"))
def test_cores_that_run_it_train_as_the_plain_model(model):
    program = CoreProgram(model)
    cores = Cores(program.plan.mesh, [f"CPU:{i}" for i in range(len(program.weights))])
    function = cores.function(program, program.rules, *program.specs())
    found = []
    for step in range(2):
        results = function([program.args(core, step) for core in range(len(program.weights))])
        (loss,) = {float(loss) for loss, _ in results}
        found.append(loss)
        program.weights = [
            [weight - RATE * grad for weight, grad in zip(weights, grads, strict=True)]
            for weights, (_, grads) in zip(program.weights, results, strict=True)
        ]
    learning = {"OPTIMIZER": "sgd", "LEARNING_RATE": RATE, "LEARNING_RATE_SCHEDULE": "constant"}
    learning |= {"WARMUP_STEPS": None, "CLIP_GRADIENT_NORM": NORM}
    plain = config_of(model, PLAN=Plan(), PIPELINED=False, **learning)
    np.testing.assert_allclose(found, losses(plain, map(random_batch, range(2))), rtol=1e-5)
    assert found[1] < found[0] - 0.01
