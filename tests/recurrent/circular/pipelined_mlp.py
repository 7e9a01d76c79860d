"""A small stack of feed-forward layers, and its gradients: plain, under placement, on cores.

It has dropout, a split dim, a weight that all layers share, and a norm without epsilon, which is
NaN for zeros, as they are in bubbles.
"""

import functools

import numpy as np
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.lowering.placement import PlacementLowering
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import LayoutRules, Shape
from pipemesh.recurrent.circular.layer_position import layer_seed

LAYERS, DROPPED, STEP = 4, 0.25, 3
_draw = np.random.default_rng(2)
INPUTS = {
    "x": (_draw.standard_normal((16, 3)).astype(np.float32), "batch:16;io:3"),
    "target": (_draw.standard_normal((16, 4)).astype(np.float32), "batch:16;d_model:4"),
}
OUTPUT = "batch:16;d_model:4"
# The shapes of weights: of each layer, and of those that all layers use or none.
OWN = {"scale": "d_model:4", "wi": "d_model:4;d_ff:6", "wo": "d_ff:6;d_model:4"}
OTHERS = {"gain": "d_ff:6", "first": "io:3;d_model:4"}


def plain(x, target, params):
    """Loss, and output of the stack."""
    x = x @ params["first"]
    for layer in range(LAYERS):
        scale, wi, wo = (params[name][layer] for name in OWN)
        normed = x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True)) * scale
        hidden = tf.tanh(normed @ wi * params["gain"])
        seed = layer_seed(tf.constant([STEP, 1]), layer)
        hidden = tf.nn.experimental.stateless_dropout(hidden, DROPPED, seed=seed, rng_alg="philox")
        x += hidden @ wo
    return tf.reduce_mean(tf.square(x - target)), x


def meshed(pipeline, step, x, target, params):
    """The same of tensors with named dims."""

    def layer(x, w, position):
        normed = x * ops.rsqrt(ops.reduce_mean(x * x, "d_model")) * w["scale"]
        hidden = ops.tanh(ops.einsum([normed, w["wi"]], ["batch", "d_ff"]) * w["gain"])
        hidden = position.dropout(hidden, rate=DROPPED, seed=tf.stack([step, 1]))
        return x + ops.einsum([hidden, w["wo"]], ["batch", "d_model"])

    x = ops.einsum([x, params["first"]], ["batch", "d_model"])
    y = pipeline(layer, x, {name: params[name] for name in (*OWN, "gain")})
    return ops.reduce_mean(ops.square(y - target)), y


@functools.cache
def initial():
    """Whole parameters, those of the layers stacked."""
    draw = np.random.default_rng(0)
    values = {}
    for name, text in (OWN | OTHERS).items():
        sizes = ([LAYERS] if name in OWN else []) + list(Shape.from_text(text).sizes)
        # Norms of small activations would blow up round-off.
        width = 1.2 if name == "first" else 0.4
        values[name] = width * draw.standard_normal(sizes).astype(np.float32)
        if name in ("scale", "gain"):
            values[name] += 1
    return values


@functools.cache
def expected():
    """Loss, output, and gradients by name, as arrays."""
    x, target = (tf.constant(array) for array, _ in INPUTS.values())
    params = {name: tf.constant(value) for name, value in initial().items()}
    with tf.GradientTape() as tape:
        tape.watch(params)
        loss, y = plain(x, target, params)
    return as_arrays((loss, y, tape.gradient(loss, params)))


def as_arrays(tree):
    return tf.nest.map_structure(lambda t: t.numpy(), tree)


def shapes(pipeline):
    """The shapes of all parameters on the mesh."""
    own = {name: pipeline.stacked(shape) for name, shape in OWN.items()}
    return own | {name: Shape.from_text(shape) for name, shape in OTHERS.items()}


def with_gradients(lowering, pipeline, step, inputs, params):
    """Loss, output of the stack and gradients; all are slices, given by name."""
    with tf.GradientTape() as tape:
        tape.watch(params)
        given = [
            Tensor(lowering, inputs[name], Shape.from_text(text))
            for name, (_, text) in INPUTS.items()
        ]
        tensors = {n: Tensor(lowering, params[n], s) for n, s in shapes(pipeline).items()}
        loss, y = meshed(pipeline, step, *given, tensors)
    return loss.slices, y.slices, tape.gradient(loss.slices, params)


def rules_of(mesh):
    """The rules for those axes that the mesh has."""
    every = LayoutRules.from_text("layers:layers;batch:data;d_ff:model")
    return LayoutRules(tuple(rule for rule in every.rules if rule[1] in mesh.axis_names))


def _ranges(mesh, shape, processor):
    shape = Shape.from_text(shape) if isinstance(shape, str) else shape
    return rules_of(mesh).tensor_layout(shape, mesh).slice_ranges(processor)


def cut(pipeline, arrays, processor):
    """A processor's slices of whole parameters, with the layers stacked as in `initial`."""
    return {
        name: arrays[name].reshape(shape.sizes)[_ranges(pipeline.mesh, shape, processor)]
        for name, shape in shapes(pipeline).items()
    }


def differences(pipeline, results):
    """The losses, outputs and gradients of processors that are not as expected."""
    found = []
    loss, y, grads = expected()
    for processor, got in enumerate(results):
        output = y[_ranges(pipeline.mesh, OUTPUT, processor)]
        wanted = {"loss": loss, "output": output, **cut(pipeline, grads, processor)}
        for name, mine in {"loss": got[0], "output": got[1], **got[2]}.items():
            want = wanted.pop(name)
            # Sums in another order; a wrong mask gives 1000 times as much.
            near = 1e-4 * max(1.0, np.abs(want).max())
            if mine.shape != want.shape or not np.allclose(mine, want, rtol=1e-4, atol=near):
                found.append(f"processor {processor}, {name}: {mine} instead of {want}")
        found += wanted
    return found


def under_placement(pipeline):
    """For each processor loss, output and gradients."""
    mesh = pipeline.mesh
    each = range(mesh.num_devices)
    lowering = PlacementLowering(mesh, rules_of(mesh), [f"CPU:{i}" for i in each])

    @tf.function(autograph=False)
    def run(step):
        def slices(array, shape):
            return ops.import_tensor(lowering, array, shape).slices

        inputs = {name: slices(array, text) for name, (array, text) in INPUTS.items()}
        params = {
            name: slices(initial()[name].reshape(shape.sizes), shape)
            for name, shape in shapes(pipeline).items()
        }
        return with_gradients(lowering, pipeline, step, inputs, params)

    loss, y, grads = as_arrays(run(tf.constant(STEP)))
    return [(loss[i], y[i], {name: of[i] for name, of in grads.items()}) for i in each]


def simd_program(pipeline):
    """The program of one core; step, inputs and parameters are flat arguments."""
    names = [*INPUTS, *OWN, *OTHERS]

    def program(lowering, step, *flat):
        given = {name: (part,) for name, part in zip(names, flat, strict=True)}
        params = {name: given.pop(name) for name in names[len(INPUTS) :]}
        results = with_gradients(lowering, pipeline, step, given, params)
        return tf.nest.map_structure(tf.identity, results)

    return program


def simd_args(pipeline, core):
    """The arguments of a core's program."""
    inputs = [array[_ranges(pipeline.mesh, text, core)] for array, text in INPUTS.values()]
    return [tf.identity(part) for part in (STEP, *inputs, *cut(pipeline, initial(), core).values())]


def on_cores(pipeline, cores):
    """For each of two calls and each core what `under_placement` returns for each processor."""
    args = []
    for i, device in enumerate(cores.devices):
        with tf.device(device):
            args.append(simd_args(pipeline, i))
    specs = [tf.TensorSpec.from_tensor(arg) for arg in args[0]]
    function = cores.function(simd_program(pipeline), rules_of(pipeline.mesh), *specs)
    calls = [map(as_arrays, function(args)) for _ in range(2)]
    return [
        [(loss[0], y[0], {n: g[0] for n, g in grads.items()}) for loss, y, grads in results]
        for results in calls
    ]
