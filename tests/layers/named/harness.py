"""Runs a named layer under a layout: results, and gradients of whole weights by logical name."""

import dataclasses
import itertools
import zlib

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.layers.named import NamedLayer, lowering_scope
from pipemesh.layers.named.weight_slices import slice_groups, slice_names
from pipemesh.lowering import PlacementLowering, Tensor, ops
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.harness import cluster

# Of the layers' dims, along the axes that the mesh has.
RULES = "batch:data;d_ff:model;heads:model;kv_heads:model;vocab:model;experts:model"
SCALE = 0.3


@dataclasses.dataclass
class Result:
    outputs: list[np.ndarray]
    grads: dict[str, np.ndarray]
    lowering: PlacementLowering
    shapes: dict[str, list[int]]  # of whole weights by path

    def assert_plain(self, function, **tolerance):
        """Compares with a plain function of the weights that `run` gives, by path."""
        weights = {path: tf.constant(SCALE * value_of(path, s)) for path, s in self.shapes.items()}
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs = function(weights)
            outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
            loss = loss_of(outputs)
        grads = tape.gradient(loss, weights)
        self.assert_close(
            [tf.convert_to_tensor(y).numpy() for y in outputs],
            {path: tf.convert_to_tensor(grad).numpy() for path, grad in grads.items()},
            **tolerance,
        )

    def assert_close(self, outputs, grads, rtol=2e-4, atol=2e-5):
        assert len(self.outputs) == len(outputs)
        for mine, wanted in zip(self.outputs, outputs, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol, atol)
        assert self.grads.keys() == grads.keys()
        for name, wanted in grads.items():
            np.testing.assert_allclose(self.grads[name], wanted, rtol, atol, err_msg=name)


def make_lowering(mesh_text, rules=RULES, first_device=0):
    mesh = Mesh.from_text(mesh_text)
    parts = [rule for rule in rules.split(";") if rule.partition(":")[2] in mesh.axis_names]
    devices = [f"CPU:{first_device + i}" for i in range(mesh.num_devices)]
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
    """For each whole weight by its path: its layout, and the names of its variables in theta."""
    found = {}
    for path, part in layers_in(layer):
        if isinstance(part, NamedLayer):
            for name, shape in part.named_shapes.items():
                layout = lowering.tensor_layout(shape)
                found[path + name] = layout, [path + n for n in slice_names(name, layout)]
    return found


def join(layout, parts):
    whole = np.zeros(layout.shape.sizes, np.float32)
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


def run(
    params,
    inputs,
    mesh_text="model:1",
    rules=RULES,
    call=None,
    scale=SCALE,
    step=3,
    values=None,
    loss=loss_of,
):
    """Makes the layer, gives its weights the values of their names, and calls it in a function.

    Args:
        params: of the layer.
        inputs: arrays; None stays.
        mesh_text: of a placement on logical CPUs.
        rules: those for axes that the mesh lacks are left out.
        call: takes layer, theta and inputs; by default `FProp`.
        scale: of the weights; None for their initial values.
        step: the global step.
        values: whole weights by path, in place of those of the names.
        loss: of the outputs; what is differentiated. None: nothing is.
    """
    call = call or (lambda layer, theta, *args: layer.FProp(theta, *args))
    lowering = make_lowering(mesh_text, rules)
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        with cluster(1), lowering_scope(lowering), py_utils.VariableStore():
            py_utils.GetOrCreateGlobalStepVar().assign(step)
            layer = params.Copy().Instantiate()
        variables = dict(layer.vars.FlattenItems())
        weights = weights_of(layer, lowering)
        assert sorted(itertools.chain(*(names for _, names in weights.values()))) == sorted(
            variables
        )
        assert values is None or values.keys() == weights.keys()
        for path, (layout, names) in weights.items():
            for group, name in zip(slice_groups(layout), names, strict=True):
                if values is not None or scale is not None:
                    whole = values[path] if values else scale * value_of(path, layout.shape.sizes)
                    variables[name].assign(whole[layout.slice_ranges(group[0])])

        @tf.function(autograph=False)
        def compute(*args):
            given = iter(args)
            filled = [None if x is None else next(given) for x in inputs]
            with cluster(1), lowering_scope(lowering), tf.GradientTape() as tape:
                # Tensors, as a pipeline passes them.
                theta = layer.theta.Transform(tf.convert_to_tensor)
                outputs = exported(call(layer, theta, *filled))
                total = loss(outputs) if loss else None
            return outputs, tape.gradient(total, variables) if loss else {}

        outputs, grads = compute(*(tf.constant(x) for x in inputs if x is not None))
        grads = {
            path: join(layout, [tf.convert_to_tensor(grads[name]).numpy() for name in names])
            for path, (layout, names) in weights.items()
            if grads.get(names[0]) is not None
        }
        shapes = {path: layout.shape.sizes for path, (layout, _) in weights.items()}
        return Result([y.numpy() for y in outputs], grads, lowering, shapes)
    finally:
        py_utils.SetEagerMode(False, test_mode=True)
