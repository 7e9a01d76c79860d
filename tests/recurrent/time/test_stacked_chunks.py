"""StackedRecurrent cuts the time into chunks; how, and of what, changes no results."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent import StackedRecurrent

LENGTH, BATCH, WIDTH = 7, 2, 3
RNG = np.random.default_rng(1)
VALUES = {
    "w0": RNG.normal(size=[WIDTH, WIDTH]).astype(np.float32),
    "w1": RNG.normal(size=[WIDTH, WIDTH]).astype(np.float32),
    "m0": RNG.normal(size=[BATCH, WIDTH]).astype(np.float32),
    "m1": RNG.normal(size=[BATCH, WIDTH]).astype(np.float32),
    "x": RNG.normal(size=[LENGTH, BATCH, WIDTH]).astype(np.float32),
}


def cell(theta, state, inputs):
    return {"m": tf.tanh(tf.matmul(inputs["x"] + state["m"], theta["w"]))}, ()


def out(state):
    return {"x": state["m"]}


class Count:
    """A layer with an accumulator, as lingvo's have them."""

    def __init__(self):
        self.values = {"count": tf.zeros([])}

    def GetAccumulatorValues(self):
        return dict(self.values)

    def SetAccumulatorValues(self, values):
        self.values = dict(values)


def plain(v, cell_fns=cell, cell_outs=out, inputs=None, begin=0, end=None):
    cells = cell_fns if isinstance(cell_fns, list) else [cell_fns] * 2
    inputs = {"x": v["x"]} if inputs is None else inputs
    states, over_time = [{"m": v["m0"]}, {"m": v["m1"]}], []
    length = inputs["x"].shape[0]
    for t in range(length):
        if not begin <= t < (length if end is None else end):
            over_time.append(tf.zeros_like(states[1]["m"]))
            continue
        x = {"x": inputs["x"][t]}
        for i in range(2):
            states[i], _ = cells[i]({"w": v[f"w{i}"]}, states[i], x)
            x = cell_outs(states[i])
        over_time.append(states[1]["m"])
    return cell_outs({"m": tf.stack(over_time)}), states


def stacked(v, **changes):
    arguments = {
        "devices": ["CPU:0", "CPU:1"],
        "cell_fns": cell,
        "cell_grads": None,
        "cell_outs": out,
        "cell_out_grads": None,
        "thetas": [{"w": v["w0"]}, {"w": v["w1"]}],
        "init_states": [{"m": v["m0"]}, {"m": v["m1"]}],
        "inputs": {"x": v["x"]},
        **changes,
    }
    return StackedRecurrent(**arguments)


def total(results):
    return tf.add_n([tf.reduce_sum(tf.abs(tf.sin(x))) for x in tf.nest.flatten(results)])


def run_tf2(build, values=VALUES):
    variables = {name: tf.Variable(value) for name, value in values.items()}

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            results = build({name: tf.identity(variable) for name, variable in variables.items()})
            loss = total(results)
        grads = tape.gradient(loss, variables)
        return results, {
            k: None if g is None else tf.convert_to_tensor(g) for k, g in grads.items()
        }

    return run()


def run_tf1(build, values=VALUES):
    with tf.Graph().as_default():
        given = {name: tf.constant(value) for name, value in values.items()}
        results = build(given)
        found = tf.gradients(total(results), list(given.values()))
        grads = {name: g for name, g in zip(given, found, strict=True) if g is not None}
        config = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
        with tf.compat.v1.Session(config=config) as session:
            return session.run((results, grads))


def assert_equal(got, want, tolerance=1e-5):
    for a, b in zip(tf.nest.flatten(got[0]), tf.nest.flatten(want[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    for name, grad in want[1].items():
        if grad is None:
            assert got[1][name] is None or not np.any(got[1][name]), name
            continue
        np.testing.assert_allclose(got[1][name], grad, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture(scope="module")
def want():
    """What the plain loop gives."""
    return run_tf2(plain)


@pytest.mark.parametrize(("num_chunks", "remat"), [(1, "none"), (3, "full"), (7, "none")])
def test_results_do_not_depend_on_chunks_or_remat(want, num_chunks, remat):
    got = run_tf2(functools.partial(stacked, num_chunks=num_chunks, remat=remat))
    assert_equal(got, want)


@pytest.mark.slow
def test_the_graph_does_not_grow_with_length_or_chunks():
    def size(length, num_chunks):
        @tf.function(autograph=False)
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = total(stacked({**VALUES, "x": x}, num_chunks=num_chunks))
            return tape.gradient(loss, x)

        spec = tf.TensorSpec([length, BATCH, WIDTH])
        graph = run.get_concrete_function(spec).graph.as_graph_def()
        return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)

    assert size(6000, 3000) == size(600, 100)


def test_extras_and_accumulators_go_through_many_chunks():
    """They are kept in lists of lists: one for each chunk, of one for each time step."""

    def build(v, num_chunks):
        counts = [Count(), Count()]

        def cell_of(count):
            def counting(theta, state, inputs):
                seen = count.GetAccumulatorValues()["count"]
                count.SetAccumulatorValues({"count": seen + 1.0})
                state1, _ = cell(theta, state, {"x": inputs["x"] * (1.0 + seen)})
                return state1, {"m": state1["m"], "seen": seen}

            return counting

        def cell_grad(theta, state, inputs, extras, d_state1):
            scale = 1.0 + extras["seen"]
            d_z = d_state1["m"] * (1.0 - extras["m"] ** 2)
            d_sum = tf.matmul(d_z, theta["w"], transpose_b=True)
            d_w = tf.matmul(inputs["x"] * scale + state["m"], d_z, transpose_a=True)
            return {"w": d_w}, {"m": d_sum}, {"x": d_sum * scale}

        cells = [cell_of(count) for count in counts]
        if num_chunks is None:
            results = plain(v, cells)
        else:
            results = stacked(
                v,
                cell_fns=cells,
                cell_grads=[cell_grad, None],
                accumulator_layers=counts,
                num_chunks=num_chunks,
            )
        return results, [tf.stop_gradient(count.values["count"]) for count in counts]

    want = run_tf1(functools.partial(build, num_chunks=None))
    assert want[0][1] == [LENGTH, LENGTH]
    assert_equal(run_tf1(functools.partial(build, num_chunks=LENGTH)), want)


@pytest.mark.parametrize(("begin", "end"), [(3, 5), (0, 0)])
def test_padding_may_fill_whole_chunks(begin, end):
    padding = np.ones([LENGTH, BATCH], bool)
    padding[begin:end, 1] = False

    def build(v):
        return stacked(v, inputs={"x": v["x"], "padding": tf.constant(padding)}, num_chunks=4)

    assert_equal(run_tf2(build), run_tf2(functools.partial(plain, begin=begin, end=end)))


def test_without_time_steps_states_stay_the_initial_ones():
    values = {**VALUES, "x": VALUES["x"][:0]}
    (output, states), grads = run_tf2(stacked, values)
    assert output["x"].shape == (0, BATCH, WIDTH)
    np.testing.assert_array_equal(states[1]["m"], VALUES["m1"])
    assert np.all(np.abs(grads["m0"]) > 0) and grads["x"].shape == (0, BATCH, WIDTH)


def test_what_cell_outs_capture_gets_its_gradient(want):
    def build(v, stack):
        scale = tf.exp(v["w0"][0, 0])

        def scaled(state):
            return {"x": scale * state["m"]}

        return stack(v, cell_outs=scaled)

    want = run_tf2(functools.partial(build, stack=plain))
    assert_equal(run_tf2(functools.partial(build, stack=stacked)), want)

    with pytest.raises(PipelineError, match=r"cell_outs\[0\] uses tensors"):
        run_tf2(
            functools.partial(
                build, stack=functools.partial(stacked, cell_out_grads=lambda d: {"m": d["x"]})
            )
        )


def test_gradients_by_hand_may_use_tensors_from_outside(want):
    def build(v):
        one = tf.add(v["w0"][0, 0] ** 2, 1.0) - v["w0"][0, 0] ** 2
        return stacked(v, cell_out_grads=lambda d: {"m": one * d["x"]})

    assert_equal(run_tf2(build), want, 1e-4)


def test_states_may_be_complex():
    values = {
        name: (value + 0.5j * value[::-1]).astype(np.complex64) for name, value in VALUES.items()
    }
    assert_equal(
        run_tf2(functools.partial(stacked, num_chunks=3), values), run_tf2(plain, values), 1e-4
    )


def test_gradients_of_half_precision_are_summed_in_float32():
    """1/256 is lost beside 1 in bfloat16, be it from step to step or from chunk to chunk."""
    values = {"x": np.ones([513, 1], np.float32) / 256}
    values["x"][0] = 1.0

    @tf.function(autograph=False)
    def run(weight):
        with tf.GradientTape() as tape:
            tape.watch(weight)

            def multiply(theta, state, inputs):
                return {"m": theta["w"] * inputs["x"]}, ()

            theta = {"w": weight}
            state = {"m": tf.zeros([1], tf.bfloat16)}
            output, _ = StackedRecurrent(
                ["CPU:0"],
                multiply,
                None,
                out,
                None,
                [theta],
                [state],
                {"x": tf.cast(values["x"], tf.bfloat16)},
                num_chunks=27,
            )
        return tape.gradient(output["x"], weight)

    assert float(run(tf.ones([], tf.bfloat16))) == 3.0


def test_inputs_may_be_integers_and_weights_a_table():
    ids = tf.constant(RNG.integers(0, WIDTH, size=[LENGTH, BATCH]), tf.int32)

    def embedding(theta, state, inputs):
        return {"m": tf.gather(theta["w"], inputs["x"]) + 0.5 * state["m"]}, ()

    def build(v, stack):
        return stack(v, cell_fns=[embedding, cell], inputs={"x": ids})

    assert_equal(
        run_tf2(functools.partial(build, stack=stacked)),
        run_tf2(functools.partial(build, stack=plain)),
    )


def test_a_dynamic_length_is_an_error():
    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, BATCH, WIDTH])])
    def run(x):
        return stacked({**VALUES, "x": x})

    with pytest.raises(PipelineError, match=r"inputs\.x has shape \(None, 2, 3\).*ensure_shape"):
        run.get_concrete_function()


ONE = Count()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_chunks": 0}, "num_chunks is 0; 7 time steps"),
        ({"num_chunks": 8}, "num_chunks is 8; 7 time steps can be cut into 1 to 7"),
        ({"remat": "some"}, "remat is 'some'"),
        ({"accumulator_layers": [ONE, ONE]}, "same layer twice"),
        ({"thetas": {"w": 1.0}}, "thetas is dict; it must be a list of 2"),
        ({"init_states": [{}, {}]}, r"init_states\[0\] has no tensor"),
        ({"cell_outs": lambda state: {}}, r"cell_outs\[0\] returned no tensor"),
        ({"cell_out_grads": lambda d: {"c": d["x"]}}, r"the gradient of cell_outs\[0\] returned"),
        ({"inputs": {"x": VALUES["x"], "y": VALUES["x"][1:]}}, "differ in dim 0.*x: 7.*y: 6"),
        ({"inputs": {"x": 1.0}}, r"inputs.x has shape \(\)"),
    ],
)
def test_what_does_not_fit_is_an_error_before_anything_runs(changes, message):
    with pytest.raises(PipelineError, match=message):
        run_tf2(functools.partial(stacked, **changes))


def test_eager_calls_are_errors():
    with pytest.raises(PipelineError, match=r"inside a tf\.function"):
        stacked(VALUES)
