"""Trains a model on a mesh for a few steps, under both lowerings."""

import tensorflow as tf

from pipemesh.lowering.placement import PlacementLowering
from tests.recurrent.circular.pipelined.model import STEPS


def as_arrays(tree):
    return tf.nest.map_structure(lambda t: t.numpy(), tree)


def train_placement(model, pipeline):
    """For each processor its history: loss, output, gradients and parameters of all steps."""
    mesh = pipeline.mesh
    devices = [f"CPU:{i}" for i in range(mesh.num_devices)]
    lowering = PlacementLowering(mesh, model.rules(mesh), devices)

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
    inputs = on_devices([model.cut_inputs(mesh, i) for i in each])
    params = on_devices([model.cut(pipeline, model.initial, i) for i in each])
    m = v = {name: lowering.raw_map(tf.zeros_like, part) for name, part in params.items()}
    step = tf.function(lambda *args: model.mesh_step(lowering, pipeline, *args), autograph=False)
    histories = [[] for _ in each]
    for number in range(STEPS):
        loss, y, grads, params, m, v = step(tf.constant(number), inputs, params, m, v)
        for i in each:
            here = (loss[i], y[i], *({n: t[i] for n, t in d.items()} for d in (grads, params)))
            histories[i].append(as_arrays(here))
    return histories


def simd_program(model, pipeline):
    """The program of one core: step, inputs, parameters, m and v in, as flat arguments."""
    inputs, names = list(model.inputs), model.names

    def program(lowering, step, *flat):
        given = dict(zip(inputs, ((t,) for t in flat), strict=False))
        rest = flat[len(inputs) :]
        groups = []
        for start in range(0, 3 * len(names), len(names)):
            part = rest[start : start + len(names)]
            groups.append({n: (t,) for n, t in zip(names, part, strict=True)})
        return tf.nest.map_structure(
            tf.identity, model.mesh_step(lowering, pipeline, step, given, *groups)
        )

    return program


def simd_args(model, pipeline, core):
    """The first arguments of a core's program."""
    inputs = model.cut_inputs(pipeline.mesh, core)
    params = model.cut(pipeline, model.initial, core)
    parts = [tf.identity(params[name]) for name in model.names]
    zeros = [tf.zeros_like(part) for part in parts]
    given = [tf.identity(inputs[name]) for name in model.inputs]
    return [tf.identity(0), *given, *parts, *zeros, *zeros]


def train_simd(model, pipeline, cores):
    """The same for each core."""
    args = []
    for i, device in enumerate(cores.devices):
        with tf.device(device):
            args.append(simd_args(model, pipeline, i))
    specs = [tf.TensorSpec.from_tensor(arg) for arg in args[0]]
    program = simd_program(model, pipeline)
    function = cores.function(program, model.rules(pipeline.mesh), *specs)
    histories = [[] for _ in cores.devices]
    for number in range(STEPS):
        for i, (device, result) in enumerate(zip(cores.devices, function(args), strict=True)):
            loss, y, grads, *state = tf.nest.map_structure(lambda t: t, result)
            one = [{name: part[name][0] for name in part} for part in (grads, *state)]
            histories[i].append(as_arrays((loss[0], y[0], one[0], one[1])))
            with tf.device(device):
                kept = args[i][1 : 1 + len(model.inputs)]
                flat = [part[name] for part in one[1:] for name in model.names]
                args[i] = [tf.identity(number + 1), *kept, *flat]
    return histories
