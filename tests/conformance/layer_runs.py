"""Runs the cases of layers: outputs, gradients of inputs and of whole weights, communication."""

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from pipemesh.layers.named import lowering_scope
from pipemesh.layers.named.weight_slices import slice_groups
from pipemesh.lowering import Cores, ops
from pipemesh.mesh import LayoutRules
from tests.conformance.layer_cases import CASES, MESH, alone, placement
from tests.layers.harness import cluster, executing
from tests.layers.named.harness import exported, join, loss_of, value_of, weights_of

STEP, SCALE = 3, 0.3


@dataclasses.dataclass
class Result:
    """The results of a case, and the lowering that counted."""

    outputs: list[np.ndarray]
    grads: dict[str, np.ndarray]
    lowering: object = None

    def assert_close(self, wanted, rtol=2e-4, atol=2e-5):
        assert len(self.outputs) == len(wanted.outputs)
        assert self.grads.keys() == wanted.grads.keys()
        for mine, theirs in zip(self.outputs, wanted.outputs, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol, atol)
        for name, theirs in wanted.grads.items():
            np.testing.assert_allclose(self.grads[name], theirs, rtol, atol, err_msg=name)


def make(case, lowering):
    """The layer, the values of its variables by name, and its weights."""
    with lowering_scope(lowering):
        layer = case.params.Copy().Instantiate()
    weights = weights_of(layer, lowering)
    values = {
        name: SCALE * value_of(path, layout.shape.sizes)[layout.slice_ranges(group[0])]
        for path, (layout, names) in weights.items()
        for group, name in zip(slice_groups(layout), names, strict=True)
    }
    assert values.keys() == dict(layer.vars.FlattenItems()).keys()
    return layer, values, weights


def call(layer, lowering, theta, inputs):
    """Outputs joined, and the loss."""
    with lowering_scope(lowering):
        outputs = exported(layer.FProp(theta, *inputs))
    return outputs, loss_of(outputs)


def _named(case, weights, inputs, variables):
    """Gradients by the names of inputs and whole weights; of slices, which are joined."""
    found = {f"input {i}": grad for i, grad in inputs.items() if grad is not None}
    for path, (layout, names) in weights.items():
        if variables[names[0]] is not None:
            found[path] = join(layout, [variables[name] for name in names])
    return found


def floating(case):
    return [i for i, x in enumerate(case.inputs) if x is not None and x.dtype.kind == "f"]


def run_tf2(case, lowering, in_graph=True):
    """Under a tape; the whole step is a function or not."""
    with executing(eager=True) as step:
        step.assign(STEP)
        layer, values, weights = make(case, lowering)
        variables = dict(layer.vars.FlattenItems())
        for name, value in values.items():
            variables[name].assign(value)

        def compute(*inputs):
            sources = {i: inputs[i] for i in floating(case)}
            with cluster(1), tf.GradientTape() as tape:
                tape.watch(sources)
                theta = layer.theta.Transform(tf.convert_to_tensor)
                outputs, loss = call(layer, lowering, theta, inputs)
            return outputs, tape.gradient(loss, [sources, variables])

        if in_graph:
            compute = tf.function(compute, autograph=False)
        outputs, grads = compute(*(None if x is None else tf.constant(x) for x in case.inputs))
        grads = [
            {k: None if g is None else tf.convert_to_tensor(g).numpy() for k, g in of.items()}
            for of in grads
        ]
        return Result([y.numpy() for y in outputs], _named(case, weights, *grads), lowering)


def run_tf1(case, lowering):
    """In a graph of TensorFlow 1."""
    with executing(eager=False) as step:
        layer, values, weights = make(case, lowering)
        variables = dict(layer.vars.FlattenItems())
        inputs = [None if x is None else tf.constant(x) for x in case.inputs]
        outputs, loss = call(layer, lowering, layer.theta, inputs)
        sources = {i: inputs[i] for i in floating(case)}
        found = tf.gradients(loss, [*sources.values(), *variables.values()])
        found = [None if grad is None else tf.convert_to_tensor(grad) for grad in found]
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            step.load(STEP, session)
            for name, value in values.items():
                variables[name].load(value, session)
            there = session.run([outputs, [grad for grad in found if grad is not None]])
        values = iter(there[1])
        grads = [None if grad is None else next(values) for grad in found]
        of_inputs = dict(zip(sources, grads[: len(sources)], strict=True))
        of_weights = dict(zip(variables, grads[len(sources) :], strict=True))
        return Result(there[0], _named(case, weights, of_inputs, of_weights), lowering)


def run_simd(case, rules):
    """Results of all cores of the program of a core, with whole gradients."""
    lowering = placement(rules)
    with executing(eager=True) as step:
        step.assign(STEP)
        layer, _, weights = make(case, lowering)
        numbers = floating(case)

        def program(core, *given):
            inputs = list(case.inputs)
            for i, x in zip(numbers, given, strict=False):
                inputs[i] = x
            theta = layer.theta.Transform(lambda _: None)
            for path, value in zip(weights, given[len(numbers) :], strict=True):
                theta.Set(path, (value,))
            with cluster(1), lowering_scope(core), tf.GradientTape() as tape:
                tape.watch(given)
                outputs = layer.FProp(theta, *inputs)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                loss = 0.0
                for i, y in enumerate(outputs):
                    weight = ops.import_tensor(
                        core, value_of(f"cotangent {i}", y.shape.sizes), y.shape
                    )
                    loss = ops.reduce_sum(y * weight) + loss
            grads = tape.gradient(loss.slices[0], list(given))
            # Nothing depends on some.
            grads = [tf.zeros([0]) if grad is None else grad for grad in grads]
            return [ops.export_tensor(y) for y in outputs], grads

        def held(core):
            return [case.inputs[i] for i in numbers] + [
                SCALE * value_of(path, layout.shape.sizes)[layout.slice_ranges(core)]
                for path, (layout, _) in weights.items()
            ]

        cores = Cores(MESH, [f"CPU:{i}" for i in range(MESH.num_devices)])
        specs = [tf.TensorSpec(value.shape) for value in held(0)]
        results = cores.function(program, rules, *specs)(
            [held(core) for core in range(MESH.num_devices)]
        )
    found = []
    for core, (outputs, grads) in enumerate(results):
        whole = {f"input {i}": np.asarray(g) for i, g in zip(numbers, grads, strict=False)}
        for (path, (layout, _)), grad in zip(weights.items(), grads[len(numbers) :], strict=True):
            whole[path] = np.asarray(grad), layout.slice_ranges(core)
        found.append((list(map(np.asarray, outputs)), whole))
    return found


@functools.cache
def plain(name):
    """The results on one processor."""
    return run_tf2(CASES[name], alone(), in_graph=False)


def rules_of(text):
    return LayoutRules.from_text(text)
