"""Runs a named layer under a layout: results, and gradients of whole weights by logical name."""

import dataclasses
import zlib

import numpy as np
import tensorflow as tf

from pipemesh.layers.named import NamedLayer, lowering_scope
from pipemesh.layers.named.weight_slices import slice_groups, slice_names
from pipemesh.lowering import PlacementLowering, Tensor, ops
from pipemesh.mesh import LayoutRules, Mesh
from tests.devices import device_name
from tests.layers.harness import cluster, executing

# Of the layers' dims, along the axes that the mesh has.
RULES = "batch:data;d_ff:model;heads:model;kv_heads:model;vocab:model;experts:model"
SCALE = 0.3


@dataclasses.dataclass
class Result:
    outputs: list[np.ndarray]
    grads: dict[str, np.ndarray]
    lowering: PlacementLowering | None = None
    shapes: dict[str, list[int]] | None = None  # of whole weights by path

    def assert_plain(self, function, **tolerance):
        """Compares with a plain function of the weights that `run` gives, by path."""
        weights = {path: tf.constant(SCALE * value_of(path, s)) for path, s in self.shapes.items()}
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs = function(weights)
            outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
            loss = loss_of(outputs)
        grads = {k: g for k, g in _numpy(tape.gradient(loss, weights)).items() if g is not None}
        outputs = [tf.convert_to_tensor(y).numpy() for y in outputs]
        self.assert_close(Result(outputs, grads), **tolerance)

    def assert_close(self, wanted, rtol=2e-4, atol=2e-5):
        assert len(self.outputs) == len(wanted.outputs)
        assert self.grads.keys() == wanted.grads.keys()
        for mine, theirs in zip(self.outputs, wanted.outputs, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol, atol)
        for name, theirs in wanted.grads.items():
            np.testing.assert_allclose(self.grads[name], theirs, rtol, atol, err_msg=name)


def _numpy(grads):
    return {k: None if g is None else tf.convert_to_tensor(g).numpy() for k, g in grads.items()}


def make_lowering(mesh_text, rules=RULES):
    mesh = Mesh.from_text(mesh_text)
    parts = [rule for rule in rules.split(";") if rule.partition(":")[2] in mesh.axis_names]
    devices = [device_name(i) for i in range(mesh.num_devices)]
    return PlacementLowering(mesh, LayoutRules.from_text(";".join(parts)), devices)


def value_of(name, shape):
    """Something for an input or weight, by its name."""
    return np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape).astype(np.float32)


def layers_in(layer, path=""):
    """All layers with the paths of their weights."""
    yield path, layer
    for name, child in layer.children.items():
        parts = child if isinstance(child, list | tuple) else [child]
        for i, part in enumerate(parts):
            yield from layers_in(part, f"{path}{name}{f'[{i}]' if part is not child else ''}.")


def weights_of(layer, lowering):
    """For each whole weight by its path: its sizes, its layout with padding, and the names of its
    variables in theta."""
    found = {}
    for path, part in layers_in(layer):
        if isinstance(part, NamedLayer):
            padded = part.padded_shapes(lowering.rules, lowering.mesh)
            for name, shape in part.named_shapes.items():
                layout = lowering.tensor_layout(padded[name])
                names = [path + n for n in slice_names(name, layout)]
                found[path + name] = shape.sizes, layout, names
    return found


def join(sizes, layout, parts):
    whole = np.zeros(sizes, np.float32)
    for group, part in zip(slice_groups(layout), parts, strict=True):
        whole[layout.slice_ranges(group[0])] = part
    return whole


def exported(outputs):
    return [
        ops.export_tensor(part) if isinstance(part, Tensor) else part
        for part in (outputs if isinstance(outputs, tuple) else (outputs,))
    ]


def loss_of(outputs):
    """A sum in which every element of every output has a weight of its own."""
    return tf.add_n(
        [
            tf.reduce_sum(tf.cast(y, tf.float32) * value_of(f"cotangent {i}", y.shape))
            for i, y in enumerate(outputs)
            if y.dtype.is_floating
        ]
    )


def made(params, lowering, whole=None):
    """A layer, values of its variables by name, and what `weights_of` returns.

    `whole` are the values of weights by path; by default those of their paths.
    """
    with lowering_scope(lowering):
        layer = params.Copy().Instantiate()
    weights = weights_of(layer, lowering)
    values = {}
    for path, (sizes, layout, names) in weights.items():
        value = whole[path] if whole else SCALE * value_of(path, sizes)
        for group, name in zip(slice_groups(layout), names, strict=True):
            values[name] = value[layout.slice_ranges(group[0])]
    assert values.keys() == dict(layer.vars.FlattenItems()).keys()
    return layer, values, weights


def by_path(weights, of_inputs, of_variables):
    """Gradients by the names of inputs and whole weights; of slices, which are joined."""
    found = {f"input {i}": grad for i, grad in of_inputs.items() if grad is not None}
    for path, (sizes, layout, names) in weights.items():
        if of_variables.get(names[0]) is not None:
            found[path] = join(sizes, layout, [of_variables[name] for name in names])
    return found


def floating(inputs):
    """The numbers of the inputs that have a gradient."""
    return [i for i, x in enumerate(inputs) if x is not None and x.dtype.kind == "f"]


def run(
    params,
    inputs,
    mesh="model:1",
    rules=RULES,
    call=None,
    initial=False,
    step=3,
    values=None,
    loss=loss_of,
    in_graph=True,
    of_inputs=False,
):
    """Makes the layer, gives its weights the values of their paths, and calls it.

    Args:
        params: of the layer.
        inputs: arrays; None stays.
        mesh: of a placement on logical CPUs, as text; or a lowering.
        rules: those for axes that the mesh lacks are left out.
        call: takes layer, theta and inputs; by default `FProp`.
        initial: whether the weights keep their initial values.
        step: the global step.
        values: whole weights by path, in place of those of the paths.
        loss: of the outputs; what is differentiated. None: nothing is.
        in_graph: whether it is called in a function.
        of_inputs: whether floating inputs have gradients, too.
    """
    call = call or (lambda layer, theta, *args: layer.FProp(theta, *args))
    lowering = make_lowering(mesh, rules) if isinstance(mesh, str) else mesh
    with executing(eager=True) as global_step:
        global_step.assign(step)
        layer, chosen, weights = made(params, lowering, values)
        variables = dict(layer.vars.FlattenItems())
        for name, value in ({} if initial else chosen).items():
            variables[name].assign(value)

        def compute(*inputs):
            sources = {i: inputs[i] for i in watched}
            with cluster(1), lowering_scope(lowering), tf.GradientTape() as tape:
                tape.watch(sources)
                # Tensors, as a pipeline passes them.
                theta = layer.theta.Transform(tf.convert_to_tensor)
                outputs = exported(call(layer, theta, *inputs))
                total = loss(outputs) if loss else None
            return outputs, tape.gradient(total, [sources, variables]) if loss else [{}, {}]

        watched = floating(inputs) if of_inputs else []
        compute = tf.function(compute, autograph=False) if in_graph else compute
        outputs, grads = compute(*(None if x is None else tf.constant(x) for x in inputs))
        grads = by_path(weights, *map(_numpy, grads))
        shapes = {path: sizes for path, (sizes, *_) in weights.items()}
        return Result([y.numpy() for y in outputs], grads, lowering, shapes)
