"""A small stack of feed-forward layers, and its training: plain, under placement, on cores.

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

LAYERS, STEPS, DROPPED = 4, 3, 0.25
# Rate, decays and epsilon of Adam; with a small epsilon it would blow up round-off where
# gradients vanish.
ADAM = (0.02, 0.9, 0.99, 0.1)
_draw = np.random.default_rng(2)
INPUTS = {
    "x": (_draw.standard_normal((16, 3)).astype(np.float32), "batch:16;io:3"),
    "target": (_draw.standard_normal((16, 4)).astype(np.float32), "batch:16;d_model:4"),
}
OUTPUT = "batch:16;d_model:4"
# The shapes of weights: of each layer, and of those that all layers use or none.
OWN = {"scale": "d_model:4", "wi": "d_model:4;d_ff:6", "wo": "d_ff:6;d_model:4"}
OTHERS = {"gain": "d_ff:6", "first": "io:3;d_model:4"}
NAMES = (*OWN, *OTHERS)


def adam(step, value, grad, m, v):
    rate, beta1, beta2, epsilon = ADAM
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * tf.square(grad)
    number = tf.cast(step + 1, value.dtype)
    scale = tf.sqrt(1 - beta2**number) / (1 - beta1**number)
    return value - rate * scale * m / (tf.sqrt(v) + epsilon), m, v


def plain(step, inputs, params):
    """Loss, and output of the stack."""
    x = inputs["x"] @ params["first"]
    for layer in range(LAYERS):
        scale, wi, wo = (params[name][layer] for name in OWN)
        normed = x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True)) * scale
        hidden = tf.tanh(normed @ wi * params["gain"])
        seed = layer_seed(tf.stack([step, 1]), layer)
        hidden = tf.nn.experimental.stateless_dropout(hidden, DROPPED, seed=seed, rng_alg="philox")
        x += hidden @ wo
    return tf.reduce_mean(tf.square(x - inputs["target"])), x


def meshed(pipeline, step, inputs, params):
    """The same of tensors with named dims."""

    def layer(x, w, position):
        normed = x * ops.rsqrt(ops.reduce_mean(x * x, "d_model")) * w["scale"]
        hidden = ops.tanh(ops.einsum([normed, w["wi"]], ["batch", "d_ff"]) * w["gain"])
        hidden = position.dropout(hidden, rate=DROPPED, seed=tf.stack([step, 1]))
        return x + ops.einsum([hidden, w["wo"]], ["batch", "d_model"])

    x = ops.einsum([inputs["x"], params["first"]], ["batch", "d_model"])
    y = pipeline(layer, x, {name: params[name] for name in (*OWN, "gain")})
    return ops.reduce_mean(ops.square(y - inputs["target"])), y


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
def plain_training():
    """For each step loss, output, gradients, and parameters after it, as arrays."""

    @tf.function(autograph=False)
    def train(step, inputs, params, m, v):
        with tf.GradientTape() as tape:
            tape.watch(params)
            loss, y = plain(step, inputs, params)
        grads = tape.gradient(loss, params)
        new = {n: adam(step, params[n], grads[n], m[n], v[n]) for n in NAMES}
        return loss, y, grads, *({n: new[n][i] for n in NAMES} for i in range(3))

    inputs = {name: tf.constant(array) for name, (array, _) in INPUTS.items()}
    params = {name: tf.constant(value) for name, value in initial().items()}
    m = v = {name: tf.zeros_like(value) for name, value in params.items()}
    history = []
    for step in range(STEPS):
        loss, y, grads, params, m, v = train(tf.constant(step), inputs, params, m, v)
        history.append(as_arrays((loss, y, grads, params)))
    return history


def as_arrays(tree):
    return tf.nest.map_structure(lambda t: t.numpy(), tree)


def shapes(pipeline):
    """The shapes of all parameters on the mesh."""
    own = {name: pipeline.stacked(shape) for name, shape in OWN.items()}
    return own | {name: Shape.from_text(shape) for name, shape in OTHERS.items()}


def mesh_step(lowering, pipeline, step, inputs, params, m, v):
    """Loss, output of the stack, gradients, and new parameters, m and v; all are slices by name."""
    given = {
        name: Tensor(lowering, inputs[name], Shape.from_text(text))
        for name, (_, text) in INPUTS.items()
    }
    with tf.GradientTape() as tape:
        tape.watch(params)
        tensors = {n: Tensor(lowering, params[n], s) for n, s in shapes(pipeline).items()}
        loss, y = meshed(pipeline, step, given, tensors)
    grads = tape.gradient(loss.slices, params)
    grads = {n: lowering.raw_map(tf.convert_to_tensor, tuple(g)) for n, g in grads.items()}
    new = {}
    for name in NAMES:
        args = (params[name], grads[name], m[name], v[name])
        new[name] = [lowering.raw_map(lambda *a, i=i: adam(step, *a)[i], *args) for i in range(3)]
    return loss.slices, y.slices, grads, *({n: new[n][i] for n in NAMES} for i in range(3))


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


def cut_inputs(mesh, processor):
    """A processor's slices of the inputs."""
    return {name: array[_ranges(mesh, text, processor)] for name, (array, text) in INPUTS.items()}


def differences(pipeline, processor, history):
    """The losses, outputs, gradients and parameters of a processor that are not as expected."""
    found = []
    for step, (got, want) in enumerate(zip(history, plain_training(), strict=True)):
        loss, y, grads, params = want
        pairs = [
            ("loss", got[0], loss),
            ("output", got[1], y[_ranges(pipeline.mesh, OUTPUT, processor)]),
        ]
        for kind, mine, whole in (("gradient", got[2], grads), ("value", got[3], params)):
            parts = cut(pipeline, whole, processor)
            pairs += [(f"{kind} of {name}", mine[name], parts[name]) for name in parts]
        for what, a, b in pairs:
            # Three steps of sums in another order; a wrong mask gives 1000 times as much.
            near = 1e-4 * max(1.0, np.abs(b).max())
            if a.shape != b.shape or not np.allclose(a, b, rtol=1e-4, atol=near):
                worst = np.abs(a - b).max() if a.shape == b.shape else f"{a.shape}, {b.shape}"
                found.append(f"processor {processor}, step {step}, {what}: {worst}")
    return found


def train_placement(pipeline):
    """For each processor its history: loss, output, gradients and parameters of all steps."""
    mesh = pipeline.mesh
    devices = [f"CPU:{i}" for i in range(mesh.num_devices)]
    lowering = PlacementLowering(mesh, rules_of(mesh), devices)

    def on_devices(parts):
        slices = {}
        for name in parts[0]:
            held = []
            for part, device in zip(parts, devices, strict=True):
                with tf.device(device):
                    # Computed there: arguments that lie elsewhere build the program once more.
                    held.append(tf.identity(part[name]))
            slices[name] = tuple(held)
        return slices

    each = range(mesh.num_devices)
    inputs = on_devices([cut_inputs(mesh, i) for i in each])
    params = on_devices([cut(pipeline, initial(), i) for i in each])
    m = v = {name: lowering.raw_map(tf.zeros_like, part) for name, part in params.items()}
    step = tf.function(functools.partial(mesh_step, lowering, pipeline), autograph=False)
    histories = [[] for _ in each]
    for number in range(STEPS):
        loss, y, grads, params, m, v = step(tf.constant(number), inputs, params, m, v)
        for i in each:
            here = (loss[i], y[i], *({n: t[i] for n, t in d.items()} for d in (grads, params)))
            histories[i].append(as_arrays(here))
    return histories


def simd_program(pipeline):
    """The program of one core: step, inputs, parameters, m and v in, as flat arguments."""
    inputs = list(INPUTS)

    def program(lowering, step, *flat):
        given = dict(zip(inputs, ((t,) for t in flat), strict=False))
        rest = [(t,) for t in flat[len(inputs) :]]
        groups = [
            dict(zip(NAMES, rest[start : start + len(NAMES)], strict=True))
            for start in range(0, len(rest), len(NAMES))
        ]
        return tf.nest.map_structure(
            tf.identity, mesh_step(lowering, pipeline, step, given, *groups)
        )

    return program


def simd_args(pipeline, core):
    """The first arguments of a core's program."""
    params = cut(pipeline, initial(), core)
    parts = [tf.identity(params[name]) for name in NAMES]
    zeros = [tf.zeros_like(part) for part in parts]
    given = [tf.identity(part) for part in cut_inputs(pipeline.mesh, core).values()]
    return [tf.identity(0), *given, *parts, *zeros, *zeros]


def train_simd(pipeline, cores):
    """For each core what `train_placement` returns for each processor."""
    args = []
    for i, device in enumerate(cores.devices):
        with tf.device(device):
            args.append(simd_args(pipeline, i))
    specs = [tf.TensorSpec.from_tensor(arg) for arg in args[0]]
    function = cores.function(simd_program(pipeline), rules_of(pipeline.mesh), *specs)
    histories = [[] for _ in cores.devices]
    for number in range(STEPS):
        for i, (device, result) in enumerate(zip(cores.devices, function(args), strict=True)):
            loss, y, grads, *state = tf.nest.map_structure(lambda t: t, result)
            one = [{name: part[name][0] for name in part} for part in (grads, *state)]
            histories[i].append(as_arrays((loss[0], y[0], one[0], one[1])))
            with tf.device(device):
                kept = args[i][1 : 1 + len(INPUTS)]
                flat = [part[name] for part in one[1:] for name in NAMES]
                args[i] = [tf.identity(number + 1), *kept, *flat]
    return histories
