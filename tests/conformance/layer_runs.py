"""Runs the cases of layers: outputs, gradients of inputs and of whole weights, communication."""

import functools

import numpy as np
import tensorflow as tf

from pipemesh.layers.named import lowering_scope
from pipemesh.lowering import Cores, ops
from tests.conformance.layer_cases import CASES, MESH, alone, placement
from tests.layers.harness import cluster, executing
from tests.layers.named.harness import (
    SCALE,
    Result,
    by_path,
    exported,
    floating,
    loss_of,
    made,
    run,
    value_of,
)

STEP = 3


def call(layer, lowering, theta, inputs):
    """Outputs joined, and the loss."""
    with lowering_scope(lowering):
        outputs = exported(layer.FProp(theta, *inputs))
    return outputs, loss_of(outputs)


def run_tf2(case, lowering, in_graph=True):
    """Under a tape; the whole step is a function or not."""
    return run(case.params, case.inputs, lowering, in_graph=in_graph, of_inputs=True)


def run_tf1(case, lowering):
    """In a graph of TensorFlow 1."""
    with executing(eager=False) as step:
        layer, values, weights = made(case.params, lowering)
        variables = dict(layer.vars.FlattenItems())
        inputs = [None if x is None else tf.constant(x) for x in case.inputs]
        outputs, loss = call(layer, lowering, layer.theta, inputs)
        sources = {i: inputs[i] for i in floating(case.inputs)}
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
        return Result(there[0], by_path(weights, of_inputs, of_weights), lowering)


def run_simd(case, rules):
    """Results of all cores of the program of a core, with whole gradients."""
    lowering = placement(rules)
    with executing(eager=True) as step:
        step.assign(STEP)
        layer, _, weights = made(case.params, lowering)
        numbers = floating(case.inputs)

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
            found = [case.inputs[i] for i in numbers]
            for path, (sizes, layout, _) in weights.items():
                part = SCALE * value_of(path, sizes)[layout.slice_ranges(core)]
                # A core is given its slice with padding.
                more = np.subtract(layout.slice_shape, part.shape)
                found.append(np.pad(part, [(0, number) for number in more]))
            return found

        cores = Cores(MESH, [f"CPU:{i}" for i in range(MESH.num_devices)])
        specs = [tf.TensorSpec(value.shape) for value in held(0)]
        results = cores.function(program, rules, *specs)(
            [held(core) for core in range(MESH.num_devices)]
        )
    found = []
    for core, (outputs, grads) in enumerate(results):
        whole = {f"input {i}": np.asarray(g) for i, g in zip(numbers, grads, strict=False)}
        of_weights = zip(weights.items(), grads[len(numbers) :], strict=True)
        for (path, (_, layout, _)), grad in of_weights:
            whole[path] = np.asarray(grad), layout.slice_ranges(core)
        found.append((list(map(np.asarray, outputs)), whole))
    return found


@functools.cache
def plain(name):
    """The results on one processor."""
    return run_tf2(CASES[name], alone(), in_graph=False)
