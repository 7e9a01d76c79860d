"""Runs one layer in both execution modes, from the same weights."""

import contextlib
import dataclasses
import zlib

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.saved_state import Slice, slice_of
from pipemesh.layers import mesh_cluster
from pipemesh.mesh import LayoutRules, Mesh
from tests.devices import KIND


@dataclasses.dataclass
class Result:
    """Everything that training depends on, by name."""

    outputs: list[np.ndarray]
    grads: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    accumulators: list[np.ndarray]
    # By name, of variables that are slices, which part of which weight they are.
    slices: dict[str, tuple[str, Slice]] = dataclasses.field(default_factory=dict)

    def assert_close(self, other, of_greatest=1e-6, own=None, **tolerance):
        """Compares with `other`; `own`: by name, what gradients may differ by in any case."""
        tolerance = {"rtol": 2e-5, "atol": 2e-6, **tolerance}
        assert len(self.outputs) == len(other.outputs)
        for a, b in zip(self.outputs, other.outputs, strict=True):
            np.testing.assert_allclose(a, b, **tolerance)
        for mine, theirs in ((self.grads, other.grads), (self.weights, other.weights)):
            mine = joined(mine, self.slices)
            assert mine.keys() == theirs.keys()
            for name, value in mine.items():
                wanted = theirs[name]
                # An element near 0 is a sum of products as large as the others' are, and keeps
                # their round-off: 8 units in the last place.
                least = of_greatest * np.abs(wanted).max()
                if own and theirs is other.grads:
                    least = max(least, own[name])
                close = {**tolerance, "atol": max(tolerance["atol"], least)}
                np.testing.assert_allclose(value, wanted, err_msg=name, **close)


def joined(values, slices):
    """Slices of weights as the whole ones that the plain model has."""
    found = {}
    for name, value in values.items():
        if name not in slices:
            found[name] = value
            continue
        of, part = slices[name]
        whole = found.setdefault(f"{of}:0", np.zeros(part.whole, value.dtype))
        ranges = zip(part.begin, value.shape, strict=True)
        whole[tuple(slice(begin, begin + size) for begin, size in ranges)] = value
    return found


def slices_among(variables):
    """Those of variables that are slices, by name."""
    return {v.name: slice_of(v) for v in variables if slice_of(v) is not None}


def initial_value(variable):
    """Of layers with named dims the own one, which is cut out of a whole tensor's."""
    if "named" in variable.name:
        return None
    rng = np.random.default_rng(zlib.crc32(variable.name.encode()))
    return rng.normal(scale=0.3, size=variable.shape).astype(np.float32)


def squared_sum(outputs):
    floating = [t for t in tf.nest.flatten(outputs) if t is not None and t.dtype.is_floating]
    return tf.add_n([tf.reduce_sum(tf.square(t)) for t in floating])


def flat_tensors(outputs):
    return [t for t in tf.nest.flatten(outputs) if t is not None]


@contextlib.contextmanager
def cluster(devices, do_eval=False):
    """So many devices along `layers`, or a mesh as text, whose axis `data` splits the batch.

    After a blank there may be further rules of the layout.
    """
    text, _, rules = str(devices if isinstance(devices, str) else f"layers:{devices}").partition(
        " "
    )
    mesh = Mesh.from_text(text)
    rules = [rules] if rules else []
    layout = LayoutRules.from_text(";".join([*["batch:data"][: "data" in mesh.axis_names], *rules]))
    # Random numbers depend on TensorFlow's seed, which a test before may have set.
    tf.random.set_seed(None)
    with mesh_cluster(mesh, KIND, do_eval=do_eval, layout=layout) as entered:
        yield entered


@contextlib.contextmanager
def executing(eager, devices=1, do_eval=False):
    """Enters lingvo's eager mode or a graph, and a cluster; gives the global step."""
    py_utils.SetEagerMode(eager, test_mode=True)
    try:
        with contextlib.nullcontext() if eager else tf.Graph().as_default():
            with cluster(devices, do_eval):
                step = py_utils.GetOrCreateGlobalStepVar()
                if eager:
                    step.assign(0)
                yield step
    finally:
        py_utils.SetEagerMode(False, test_mode=True)


def evaluated(tensors):
    """Values of tensors of the graph, whose variables are initialized."""
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        return session.run(tensors)


def run_tf1(params, inputs, *, steps=0, num_devices=1, do_eval=False, loss=squared_sum):
    with executing(False, num_devices, do_eval) as step:
        layer = params.Copy().Instantiate()
        outputs = layer.FPropDefaultTheta(*tf.nest.map_structure(as_tensor, inputs))
        variables = layer.vars.Flatten()
        optimizer = tf.compat.v1.train.AdamOptimizer(0.05)
        grads = optimizer.compute_gradients(loss(outputs), variables) if loss else []
        train = optimizer.apply_gradients(grads, global_step=step) if loss else step
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for variable in variables:
                if (value := initial_value(variable)) is not None:
                    variable.load(value, session)
            fetched = [
                flat_tensors(outputs),
                {v.name: tf.convert_to_tensor(g) for g, v in grads if g is not None},
                layer.GetAccumulatorValues().Flatten(),
                # With the others, because TensorFlow prepares each set of fetches anew.
                train if steps else [],
            ]
            results = [session.run(fetched) for _ in range(max(steps, 1))]
            weights = session.run({v.name: v for v in variables})
    outputs, grad_values, accumulators, _ = results[0]
    return Result(outputs, grad_values, weights, accumulators, slices_among(variables))


def run_tf2(
    params,
    inputs,
    *,
    steps=0,
    num_devices=1,
    do_eval=False,
    loss=squared_sum,
    function=True,
    shake=None,
):
    """Runs a layer; `shake`, if given, returns the first value of a weight from it."""
    with executing(True, num_devices, do_eval) as step:
        layer = params.Copy().Instantiate()
        variables = layer.vars.Flatten()
        for variable in variables:
            if (value := initial_value(variable)) is not None:
                variable.assign(value)
            if shake is not None:
                variable.assign(shake(variable.numpy()))
        inputs = tf.nest.map_structure(as_tensor, inputs)

        def compute():
            with tf.GradientTape() as tape:
                outputs = layer.FPropDefaultTheta(*inputs)
                total = loss(outputs) if loss else None
            grads = tape.gradient(total, variables) if loss else [None] * len(variables)
            grads = [None if g is None else tf.convert_to_tensor(g) for g in grads]
            accumulators = [tf.convert_to_tensor(t) for t in layer.GetAccumulatorValues().Flatten()]
            return flat_tensors(outputs), grads, accumulators

        if function:
            compute = tf.function(compute, autograph=False)
        outputs, grads, accumulators = compute()
        named = {v.name: g.numpy() for v, g in zip(variables, grads, strict=True) if g is not None}
        result = Result([t.numpy() for t in outputs], named, {}, [t.numpy() for t in accumulators])
        result.slices = slices_among(variables)
        optimizer = tf.compat.v1.train.AdamOptimizer(0.05)
        for _ in range(steps):
            _, grads, _ = compute()
            pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
            optimizer.apply_gradients(pairs)
            step.assign_add(1)
        result.weights = {v.name: v.numpy() for v in variables}
        return result


def as_tensor(value):
    return None if value is None else tf.constant(value)


def run_eagerly(*args, **kwargs):
    return run_tf2(*args, function=False, **kwargs)
