"""The training step of the language model as the program of a core: for TPUs, and run on CPUs."""

import collections
import functools
import re

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
# Rate, decays and epsilon of Adam, and the norm that gradients are clipped to.
RATE, BETA1, BETA2, EPSILON, NORM = 0.02, 0.9, 0.99, 0.1, 0.3


class CoreProgram:
    """Embedding, blocks in a loop over ticks, loss, clipping and Adam.

    Attributes:
        stack: the model's, made under its plan.
        rules: of the program's lowering.
        shapes: of all whole weights by name.
        initial: their values, for each core a list.
    """

    def __init__(self, config):
        self._plan = config.PLAN
        py_utils.SetEagerMode(True, test_mode=True)
        try:
            with self.cluster():
                py_utils.GetOrCreateGlobalStepVar().assign(0)
                tf.random.set_seed(SEED)
                self.stack = pipelined(config).Instantiate().stack
                simd = self.stack.simd
                self.rules, self.shapes = simd.rules, simd.shapes
                devices = [f"CPU:{i}" for i in range(self._plan.mesh.num_devices)]
                lowering = PlacementLowering(self._plan.mesh, self.rules, devices)
                weights = simd.weights(lowering, self.stack.theta)
        finally:
            py_utils.SetEagerMode(False, test_mode=True)
        assert weights.keys() == self.shapes.keys()
        self.initial = [
            [weights[name].slices[core] for name in self.shapes] for core in range(len(devices))
        ]

    def cluster(self):
        return mesh_cluster(self._plan.mesh, layout=self._plan.layout, lowering="simd")

    def __call__(self, core, step, *given):
        """One step: loss, and new weights and moments.

        Args:
            core: the lowering.
            step: int64 scalar.
            *given: inputs, weights, first and second moments.
        """
        inputs, state = given[: len(INPUTS)], given[len(INPUTS) :]
        number = len(self.shapes)
        weights, m, v = (list(state[i * number :][:number]) for i in range(3))
        with self.cluster(), tf.GradientTape() as tape:
            tape.watch(weights)
            named = self._named(core, weights)
            with whole_batch_randomness(step):
                loss, total, _ = self.stack.simd(core, named, inputs, step)
            mean = loss / total
        grads = [tf.convert_to_tensor(g) for g in tape.gradient(mean.slices[0], weights)]
        squares = [ops.reduce_sum(grad * grad) for grad in self._named(core, grads).values()]
        norm = tf.sqrt(tf.add_n([square.slices[0] for square in squares]))
        scale = NORM / tf.maximum(norm, NORM)
        new = [self._adam(step, *each, scale) for each in zip(weights, grads, m, v, strict=True)]
        return ops.export_tensor(mean), [part for kind in zip(*new, strict=True) for part in kind]

    def _named(self, core, slices):
        pairs = zip(self.shapes.items(), slices, strict=True)
        return {name: Tensor(core, (part,), shape) for (name, shape), part in pairs}

    @staticmethod
    def _adam(step, weight, grad, m, v, scale):
        grad = grad * scale
        m = BETA1 * m + (1 - BETA1) * grad
        v = BETA2 * v + (1 - BETA2) * tf.square(grad)
        number = tf.cast(step + 1, tf.float32)
        rate = RATE * tf.sqrt(1 - BETA2**number) / (1 - BETA1**number)
        return weight - rate * m / (tf.sqrt(v) + EPSILON), m, v

    def args(self, core, number=0):
        """The first arguments of a core."""
        batch = random_batch(number)
        zeros = [tf.zeros_like(weight) for weight in self.initial[core]]
        inputs = [tf.constant(batch[name]) for name in INPUTS]
        return [tf.constant(number, tf.int64), *inputs, *self.initial[core], *zeros, *zeros]

    def specs(self):
        return [tf.TensorSpec.from_tensor(arg) for arg in self.args(0)]


RULES = "batch:data;heads:model;d_ff:model;vocab:model"
LAYERS_GROUPS = [[i, i + 4] for i in range(4)]
DATA_GROUPS = [[i, i + 2] for i in (0, 1, 4, 5)]
MODEL_GROUPS = [[i, i + 1] for i in range(0, 8, 2)]
LAYERS_AND_MODEL_GROUPS = [[0, 1, 4, 5], [2, 3, 6, 7]]
MODELS = {
    "dense": {},
    "tied": {"TIED_EMBEDDINGS": True},
    "experts": {"NUM_EXPERTS": 4, "HIDDEN_DIM": 16},
}


@functools.cache
def program_of(mesh, microbatches, model):
    rules = RULES.replace("d_ff", "experts") if model == "experts" else RULES
    given = [rule for rule in rules.split(";") if rule.split(":")[1] in mesh]
    plan = Plan(mesh, ";".join(given), "gpipe", microbatches, lowering="simd")
    return CoreProgram(config(plan, model))


def config(plan, model, **options):
    blocks = 4 if plan.num_stages == 4 else 2
    return small(
        PLAN=plan, NUM_LAYERS=blocks, NUM_HEADS=4, DROPOUT_PROB=0.1, **MODELS[model], **options
    )


@functools.cache
def text(mesh="layers:2;data:2;model:2", microbatches=2, model="dense"):
    program = program_of(mesh, microbatches, model)
    return legalize(program, program.stack.plan.mesh, program.rules, *program.specs())


def count(word):
    return collections.Counter(str(numbers) for numbers in numbers_after(word, text()))


@pytest.mark.parametrize(
    "model", ["dense", "experts", pytest.param("tied", marks=pytest.mark.exhaustive)]
)
def test_no_operation_of_the_whole_step_stays_but_the_two_loops(model):
    assert not not_lowered(text(model=model))
    assert text(model=model).count('"tf.While"') == 2


@pytest.mark.slow
def test_activations_go_to_the_next_stage_and_gradients_to_the_one_before():
    # The hidden vectors, and the weights of labels, which the last layer reads.
    for found in numbers_after("source_target_pairs", text()):
        assert sorted(found) == sorted([i, (i + 4) % 8] for i in range(8))
    assert len(numbers_after("source_target_pairs", text())) == 4
    longer = numbers_after("source_target_pairs", text("layers:4;model:2"))
    up = sorted([i, (i + 2) % 8] for i in range(8))
    down = sorted([b, a] for a, b in up)
    assert [sorted(pairs) for pairs in longer] == [up, up, down, down]


def test_sums_have_the_groups_of_their_axes():
    found = count("replica_groups")
    wanted = LAYERS_GROUPS, DATA_GROUPS, MODEL_GROUPS, LAYERS_AND_MODEL_GROUPS
    assert set(found) == set(map(str, wanted))
    # Loss, number of tokens, and once for each weight of which replicas have copies.
    shapes = program_of("layers:2;data:2;model:2", 2, "dense").shapes
    assert found[str(DATA_GROUPS)] == 2 + len(shapes)


def test_gradients_of_replicas_are_summed_once_and_not_each_tick():
    bodies = [part for part in text().split("func.func") if "while" in part.split("(")[0]]
    assert len(bodies) == 4
    groups = [found for body in bodies for found in numbers_after("replica_groups", body)]
    # Each block's two halves end in a sum over `model`; nothing else goes around inside.
    assert groups and all(found == MODEL_GROUPS for found in groups)


@pytest.mark.slow
def test_the_program_does_not_grow_with_the_number_of_microbatches():
    def operations(program):
        # Constants may be shared.
        return len(re.findall(r"mhlo\.(?!constant)", program))

    mesh = "layers:4;model:2"
    assert operations(text(mesh, microbatches=4)) == operations(text(mesh))


def trained(program, steps):
    """The loss of each step on all cores, by the program that each of them runs."""
    mesh = program.stack.plan.mesh
    cores = Cores(mesh, [f"CPU:{i}" for i in range(mesh.num_devices)])
    function = cores.function(program, program.rules, *program.specs())
    args = [program.args(core) for core in range(mesh.num_devices)]
    found = []
    for step in range(steps):
        results = function(args)
        (loss,) = {float(loss) for loss, _ in results}
        found.append(loss)
        for core, (_, state) in enumerate(results):
            inputs = program.args(core, step + 1)[: -len(state)]
            args[core] = [*inputs, *map(tf.identity, state)]
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "model",
    [
        "dense",
        pytest.param("tied", marks=pytest.mark.exhaustive),
        pytest.param("experts", marks=pytest.mark.exhaustive),
    ],
)
def test_cores_that_run_it_train_as_one_core_does_and_begin_as_the_plain_model(model):
    found = trained(program_of("layers:2;model:2", 2, model), steps=3)
    np.testing.assert_allclose(found, trained(program_of("layers:1", 1, model), 3), rtol=1e-5)
    plain = losses(config(Plan(), model, PIPELINED=False), [random_batch(0)])
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-5)
