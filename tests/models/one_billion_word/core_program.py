"""The training step of a small language model as the program of a core."""

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.layers import mesh_cluster
from pipemesh.layers.step_seed import whole_batch_randomness
from pipemesh.lowering import PlacementLowering, Tensor, ops
from tests.models.one_billion_word.language_model import SEED, pipelined, random_batch

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
