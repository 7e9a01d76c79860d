"""What a model is, and one training step of it, plain and on a mesh."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import LayoutRules, Shape

# Rate, decays and epsilon of Adam; with a small epsilon it would blow up round-off where
# gradients vanish.
ADAM = (0.02, 0.9, 0.99, 0.1)
STEPS = 3


def adam(step, value, grad, m, v):
    rate, beta1, beta2, epsilon = ADAM
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * tf.square(grad)
    number = tf.cast(step + 1, value.dtype)
    scale = tf.sqrt(1 - beta2**number) / (1 - beta1**number)
    return value - rate * scale * m / (tf.sqrt(v) + epsilon), m, v


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model with a stack of alike layers.

    Attributes:
        name: of the model.
        layers: how many.
        own: by name the shapes of one layer's weights.
        shared: those of weights that all layers use.
        outside: those of weights before and after the stack.
        inputs: by name arrays and their shapes.
        output: the shape of what comes out of the stack.
        plain: takes the step, inputs and whole parameters; returns loss and output of the stack.
        meshed: takes the pipeline, and the same as mesh tensors.
        ones: the weights around 1; the others are around 0.
    """

    name: str
    layers: int
    own: dict[str, str]
    shared: dict[str, str]
    outside: dict[str, str]
    inputs: dict[str, tuple[np.ndarray, str]]
    output: str
    plain: Callable
    meshed: Callable
    ones: tuple[str, ...] = ()

    @property
    def names(self):
        """Of all parameters."""
        return (*self.own, *self.shared, *self.outside)

    def in_layers(self, params):
        """The parameters that the layer function gets."""
        return {name: params[name] for name in (*self.own, *self.shared)}

    @functools.cached_property
    def initial(self):
        """Whole parameters, those of the layers stacked."""
        draw = np.random.default_rng(0)
        values = {}
        for name, text in (self.own | self.shared | self.outside).items():
            sizes = ([self.layers] if name in self.own else []) + list(Shape.from_text(text).sizes)
            # Norms of small activations would blow up round-off.
            width = 1.2 if name in self.outside else 0.4
            values[name] = width * draw.standard_normal(sizes).astype(np.float32)
            if name in self.ones:
                values[name] += 1
        return values

    @functools.cached_property
    def plain_training(self):
        """For each step loss, output, gradients, and parameters after it, as arrays."""

        @tf.function(autograph=False)
        def train(step, inputs, params, m, v):
            with tf.GradientTape() as tape:
                tape.watch(params)
                loss, y = self.plain(step, inputs, params)
            grads = tape.gradient(loss, params)
            grads = {name: tf.convert_to_tensor(grad) for name, grad in grads.items()}
            new = {n: adam(step, params[n], grads[n], m[n], v[n]) for n in self.names}
            return loss, y, grads, *({n: new[n][i] for n in self.names} for i in range(3))

        inputs = {name: tf.constant(array) for name, (array, _) in self.inputs.items()}
        params = {name: tf.constant(value) for name, value in self.initial.items()}
        m = v = {name: tf.zeros_like(value) for name, value in params.items()}
        history = []
        for step in range(STEPS):
            loss, y, grads, params, m, v = train(tf.constant(step), inputs, params, m, v)
            history.append(tf.nest.map_structure(lambda t: t.numpy(), (loss, y, grads, params)))
        return history

    def shapes(self, pipeline):
        """The shapes of all parameters on the mesh."""
        own = {name: pipeline.stacked(shape) for name, shape in self.own.items()}
        rest = (self.shared | self.outside).items()
        return own | {name: Shape.from_text(shape) for name, shape in rest}

    def mesh_step(self, lowering, pipeline, step, inputs, params, m, v):
        """One training step on a mesh.

        Args:
            lowering: placement or SIMD.
            pipeline: runs the layers.
            step: scalar.
            inputs: by name slices.
            params: by name slices.
            m: of Adam.
            v: of Adam.

        Returns:
            Loss, output of the stack, gradients, and new parameters, m and v; all are slices.
        """
        shapes = self.shapes(pipeline)
        given = {
            name: Tensor(lowering, inputs[name], Shape.from_text(text))
            for name, (_, text) in self.inputs.items()
        }
        with tf.GradientTape() as tape:
            tape.watch(params)
            tensors = {name: Tensor(lowering, params[name], shapes[name]) for name in self.names}
            loss, y = self.meshed(pipeline, step, given, tensors)
        grads = tape.gradient(loss.slices, params)
        grads = {n: lowering.raw_map(tf.convert_to_tensor, tuple(g)) for n, g in grads.items()}
        new = {}
        for name in self.names:
            args = (params[name], grads[name], m[name], v[name])
            new[name] = [
                lowering.raw_map(lambda *a, i=i: adam(step, *a)[i], *args) for i in range(3)
            ]
        return loss.slices, y.slices, grads, *({n: new[n][i] for n in self.names} for i in range(3))

    def rules(self, mesh):
        """The rules for those axes that the mesh has."""
        every = LayoutRules.from_text("layers:layers;batch:data;heads:model;d_ff:model;vocab:model")
        return LayoutRules(tuple(rule for rule in every.rules if rule[1] in mesh.axis_names))

    def cut(self, pipeline, arrays, processor):
        """A processor's slices of whole parameters, with the layers stacked as in `initial`."""
        rules, parts = self.rules(pipeline.mesh), {}
        for name, shape in self.shapes(pipeline).items():
            layout = rules.tensor_layout(shape, pipeline.mesh)
            parts[name] = arrays[name].reshape(shape.sizes)[layout.slice_ranges(processor)]
        return parts

    def cut_inputs(self, mesh, processor):
        """A processor's slices of the inputs."""
        return {
            name: array[self._ranges(mesh, text, processor)]
            for name, (array, text) in self.inputs.items()
        }

    def _ranges(self, mesh, text, processor):
        return self.rules(mesh).tensor_layout(Shape.from_text(text), mesh).slice_ranges(processor)

    def differences(self, pipeline, processor, history):
        """What of a processor's steps (loss, output, gradients, parameters) is not as expected."""
        found = []
        for step, (got, want) in enumerate(zip(history, self.plain_training, strict=True)):
            loss, y, grads, params = want
            ranges = self._ranges(pipeline.mesh, self.output, processor)
            pairs = [("loss", got[0], loss), ("output", got[1], y[ranges])]
            for kind, mine, whole in (("gradient", got[2], grads), ("value", got[3], params)):
                parts = self.cut(pipeline, whole, processor)
                pairs += [(f"{kind} of {name}", mine[name], parts[name]) for name in parts]
            for what, a, b in pairs:
                # Three steps of sums in another order; a wrong mask gives 1000 times as much.
                near = 1e-4 * max(1.0, np.abs(b).max())
                if a.shape != b.shape or not np.allclose(a, b, rtol=1e-4, atol=near):
                    worst = np.abs(a - b).max() if a.shape == b.shape else f"{a.shape}, {b.shape}"
                    found.append(f"processor {processor}, step {step}, {what}: {worst}")
        return found
