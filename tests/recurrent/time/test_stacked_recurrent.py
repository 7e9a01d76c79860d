"""StackedRecurrent equals a plain loop over layers and time, on any number of devices.

Building takes most of the time, so that what does not depend on it is tested with few chunks, and
in one execution mode.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils
from lingvo.core import recurrent as lingvo_recurrent

from pipemesh.backend.structure import Structure
from pipemesh.errors import PipelineError
from pipemesh.randomness import plan_free_randomness
from pipemesh.randomness.scope import WholeDraws
from pipemesh.recurrent import StackedRecurrent, record_placement
from pipemesh.recurrent.passes.passes import Cuts
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.time.stacked_recurrent import LayerArguments, LayerStage
from tests.pairwise import in_turn

CHUNK, SIZE = 5, 3
INPUTS, STATES, STATE = (CHUNK, SIZE), "states over time", (SIZE,)


def reads(theta, state, inputs):
    return {"m": tf.tanh(theta["w"] * inputs["x"] + state["m"])}, ()


def does_not_read(theta, state, inputs):
    return {"m": tf.tanh(theta["w"] * inputs["x"])}, ()


@pytest.mark.parametrize(
    ("cell", "unused_state", "recomputes", "want"),
    [
        (reads, False, False, {INPUTS, STATE, STATES}),
        (reads, False, True, {INPUTS, STATE}),
        (does_not_read, True, False, {INPUTS, STATE}),
    ],
)
def test_a_chunk_keeps_its_inputs_and_the_states_that_are_read(
    cell, unused_state, recomputes, want
):
    with tf.Graph().as_default():
        given = {"x": tf.zeros([SIZE])}
        arguments = LayerArguments(
            number=0,
            device="CPU:0",
            cell_fn=cell,
            cell_grad=None,
            cell_out=lambda state: {"x": state["m"]},
            cell_out_grad=None,
            theta={"w": tf.ones([])},
            state0={"m": tf.zeros([SIZE])},
            accumulator_layer=None,
        )
        layer = LayerStage(
            arguments, Structure(given, "inputs"), [tf.TensorSpec([SIZE])], unused_state
        )
        traced = TracedStage(
            layer.stage([tf.constant(0), tf.constant(10)], CHUNK),
            [tf.TensorSpec([CHUNK, SIZE])],
            Cutting(2, CHUNK, 0),
            False,
            lambda: WholeDraws({}, lambda name, dim, folded: 1),
        )
        traced.differentiate(range(len(traced.outputs)))
        kept = Cuts(traced, lambda node: recomputes).kept
        # Scalars that say which time steps were computed do not count.
        large = {
            STATES if spec.dtype == tf.variant else tuple(spec.shape)
            for spec in map(traced.spec, kept)
            if spec.dtype != tf.int32
        }
    assert large == want


LAYERS, LENGTH, BATCH, WIDTH = 3, 5, 3, 4
RNG = np.random.default_rng(0)


def random(*shape):
    return RNG.normal(size=shape).astype(np.float32)


VALUES = {
    **{f"gates{i}": random(2 * WIDTH, 4 * WIDTH) for i in range(LAYERS)},
    **{f"bias{i}": random(4 * WIDTH) for i in range(LAYERS)},
    **{f"c{i}": random(BATCH, WIDTH) for i in range(LAYERS)},
    **{f"m{i}": random(BATCH, WIDTH) for i in range(LAYERS)},
    "x": random(LENGTH, BATCH, WIDTH),
}


def lstm(theta, state, inputs):
    z = tf.matmul(tf.concat([inputs.x, state.m], axis=1), theta.gates) + theta.bias
    i, f, o, g = tf.split(z, 4, axis=1)
    c = tf.sigmoid(f) * state.c + tf.sigmoid(i) * tf.tanh(g)
    state1 = py_utils.NestedMap(c=c, m=tf.sigmoid(o) * tf.tanh(c), steps=state.steps + 1)
    return state1, py_utils.NestedMap()


def lstm_out(state):
    return py_utils.NestedMap(x=state.m)


def lstm_out_grad(d_out):
    zeros = tf.zeros_like(d_out.x)
    return py_utils.NestedMap(c=zeros, m=d_out.x, steps=tf.constant(0))


def thetas_of(v):
    return [py_utils.NestedMap(gates=v[f"gates{i}"], bias=v[f"bias{i}"]) for i in range(LAYERS)]


def states_of(v):
    return [
        py_utils.NestedMap(c=v[f"c{i}"], m=v[f"m{i}"], steps=tf.constant(10 * i))
        for i in range(LAYERS)
    ]


def devices_of(count):
    """Layers lie on devices as evenly as may be, neighbours together."""
    return [f"CPU:{i * count // LAYERS}" for i in range(LAYERS)]


def plain(cell_fns, cell_outs, thetas, init_states, inputs):
    """Time outside, layers inside; nothing on any special device."""
    states, over_time = list(init_states), []
    for t in range(tf.nest.flatten(inputs)[0].shape[0]):
        x = tf.nest.map_structure(lambda part, t=t: part[t], inputs)
        for i, (cell_fn, cell_out) in enumerate(zip(cell_fns, cell_outs, strict=True)):
            states[i], _ = cell_fn(thetas[i], states[i], x)
            x = cell_out(states[i])
        over_time.append(states[-1])
    return cell_outs[-1](tf.nest.map_structure(lambda *x: tf.stack(x), *over_time)), states


def build_plain(v, cell_fns=None, cell_outs=None):
    inputs = py_utils.NestedMap(x=v["x"])
    return plain(
        cell_fns or [lstm] * LAYERS,
        cell_outs or [lstm_out] * LAYERS,
        thetas_of(v),
        states_of(v),
        inputs,
    )


def build_stacked(v, num_devices=2, stacked=None, **changes):
    arguments = {
        "devices": devices_of(num_devices),
        "cell_fns": lstm,
        "cell_grads": None,
        "cell_outs": lstm_out,
        "cell_out_grads": lstm_out_grad,
        "thetas": thetas_of(v),
        "init_states": states_of(v),
        "inputs": py_utils.NestedMap(x=v["x"]),
        **({"num_chunks": 1} if stacked is None else {}),
        **changes,
    }
    output, states = (stacked or StackedRecurrent)(**arguments)
    return output, list(states)


def loss_of(results):
    """A loss that depends on the outputs and on every layer's final state."""
    floating = [x for x in tf.nest.flatten(results) if x.dtype.is_floating]
    return tf.add_n([tf.reduce_sum(tf.sin((i + 1.0) * x)) for i, x in enumerate(floating)])


def outputs_only(results):
    return loss_of(results[0])


def run_tf1(build, values, loss=loss_of):
    with tf.Graph().as_default():
        variables = {
            name: tf.compat.v1.get_variable(name, initializer=tf.constant(value))
            for name, value in values.items()
        }
        results = build({name: tf.identity(variable) for name, variable in variables.items()})
        found = tf.gradients(loss(results), list(variables.values()))
        grads = {k: g for k, g in zip(variables, found, strict=True) if g is not None}
        config = tf.compat.v1.ConfigProto(device_count={"CPU": LAYERS})
        with tf.compat.v1.Session(config=config) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            flat, grads = session.run([tf.nest.flatten(results), grads])
    return tf.nest.pack_sequence_as(results, flat), {name: grads.get(name) for name in values}


def run_tf2(build, values, loss=loss_of):
    variables = {name: tf.Variable(value) for name, value in values.items()}

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            results = build({name: tf.identity(variable) for name, variable in variables.items()})
            total = loss(results)
        return results, tape.gradient(total, variables)

    return run()


RUNNERS = {"tf1": run_tf1, "tf2": run_tf2}


@pytest.fixture(scope="module", params=RUNNERS)
def mode(request):
    """A way to run, and what the plain loop gives that way."""
    return RUNNERS[request.param], RUNNERS[request.param](build_plain, VALUES)


def assert_equal(got, want, **tolerance):
    tolerance = {"rtol": 1e-5, "atol": 1e-5, **tolerance}
    tf.nest.assert_same_structure(got[0], want[0])
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got[0], want[0]
    )
    for name, grad in want[1].items():
        if grad is None:
            assert got[1][name] is None or not np.any(got[1][name]), name
        else:
            np.testing.assert_allclose(got[1][name], grad, err_msg=name, **tolerance)


@pytest.mark.parametrize(
    ("mode", "num_devices", "num_chunks"),
    in_turn(list(RUNNERS), [(1, None), (2, 3), (3, None)]),
    indirect=["mode"],
)
def test_outputs_states_and_gradients_equal_the_plain_loop(mode, num_devices, num_chunks):
    run, want = mode
    assert all(np.any(grad) for grad in want[1].values())
    build = functools.partial(build_stacked, num_devices=num_devices, num_chunks=num_chunks)
    got = run(build, VALUES)
    assert_equal(got, want)
    output, states = got[0]
    assert isinstance(output, py_utils.NestedMap) and output.x.shape == (LENGTH, BATCH, WIDTH)
    assert [int(state.steps) for state in states] == [10 * i + LENGTH for i in range(LAYERS)]


def test_a_loss_of_the_outputs_alone_trains_all_layers():
    want = run_tf2(build_plain, VALUES, loss=outputs_only)
    assert_equal(run_tf2(build_stacked, VALUES, loss=outputs_only), want)


@pytest.mark.slow
def test_a_loss_of_one_final_state_trains_the_layers_up_to_it():
    def loss(results):
        return tf.reduce_sum(tf.sin(results[1][1].c))

    want = run_tf2(build_plain, VALUES, loss=loss)
    got = run_tf2(build_stacked, VALUES, loss=loss)
    assert_equal(got, want)
    assert np.any(got[1]["gates0"]) and not np.any(got[1].get("gates2", 0))


def test_a_single_layer_returns_a_list_of_one_final_state():
    values = {name: VALUES[name] for name in ("gates0", "bias0", "c0", "m0", "x")}

    def given(v):
        theta = py_utils.NestedMap(gates=v["gates0"], bias=v["bias0"])
        state = py_utils.NestedMap(c=v["c0"], m=v["m0"], steps=tf.constant(0))
        return [theta], [state], py_utils.NestedMap(x=v["x"])

    def build(v):
        output, states = StackedRecurrent(["CPU:1"], lstm, None, lstm_out, lstm_out_grad, *given(v))
        assert len(states) == 1
        return output, states

    assert_equal(
        run_tf2(build, values), run_tf2(lambda v: plain([lstm], [lstm_out], *given(v)), values)
    )


@tf.custom_gradient
def doubled_gradient(x):
    return tf.identity(x), lambda d: 2.0 * d


@pytest.mark.slow
def test_the_gradients_that_the_user_gives_are_used():
    def cell(theta, state, inputs):
        m = tf.tanh(tf.matmul(inputs.x + state.m, theta.gates[:WIDTH, :WIDTH]))
        return py_utils.NestedMap(c=state.c, m=m, steps=state.steps), py_utils.NestedMap(m1=m)

    def cell_grad(theta, state, inputs, extras, d_state1):
        weight = theta.gates[:WIDTH, :WIDTH]
        d_z = 2.0 * d_state1.m * (1.0 - extras.m1**2)
        d_weight = tf.matmul(inputs.x + state.m, d_z, transpose_a=True)
        d_x = tf.matmul(d_z, weight, transpose_b=True)
        d_theta = py_utils.NestedMap(
            gates=tf.pad(d_weight, [[0, WIDTH], [0, 3 * WIDTH]]), bias=tf.zeros_like(theta.bias)
        )
        d_state = py_utils.NestedMap(c=d_state1.c, m=d_x, steps=d_state1.steps)
        return d_theta, d_state, py_utils.NestedMap(x=d_x), None

    def doubled_cell(theta, state, inputs):
        z = tf.matmul(inputs.x + state.m, theta.gates[:WIDTH, :WIDTH])
        m = tf.tanh(doubled_gradient(z))
        return py_utils.NestedMap(c=state.c, m=m, steps=state.steps), py_utils.NestedMap()

    def half_out_grad(d_out):
        return lstm_out_grad(py_utils.NestedMap(x=0.5 * d_out.x))

    @tf.custom_gradient
    def half_gradient(x):
        return tf.identity(x), lambda d: 0.5 * d

    def half_out(state):
        return py_utils.NestedMap(x=half_gradient(state.m))

    # What the last layer gives to the outside has TensorFlow's gradient, as in lingvo.
    outs = [half_out] * (LAYERS - 1) + [lstm_out]
    plain_build = functools.partial(build_plain, cell_fns=[doubled_cell] * LAYERS, cell_outs=outs)
    stacked = functools.partial(
        build_stacked, cell_fns=cell, cell_grads=cell_grad, cell_out_grads=half_out_grad
    )
    assert_equal(run_tf2(stacked, VALUES), run_tf2(plain_build, VALUES))


def test_states_that_no_cell_reads_need_not_be_kept():
    """As in lingvo's pipeline of microbatches: the state is only what a layer hands on."""

    def cell(theta, state, inputs):
        m = tf.tanh(tf.matmul(inputs.x, theta.gates[:WIDTH, :WIDTH]))
        return py_utils.NestedMap(c=m, m=m, steps=tf.constant(1)), py_utils.NestedMap()

    want = run_tf2(functools.partial(build_plain, cell_fns=[cell] * LAYERS), VALUES)
    got = run_tf2(functools.partial(build_stacked, cell_fns=cell, unused_acc_state=True), VALUES)
    assert_equal(got, want)


def test_a_state_that_a_cell_does_read_must_be_kept():
    with pytest.raises(PipelineError, match=r"unused_acc_state.*(c|m|steps)"):
        run_tf2(functools.partial(build_stacked, unused_acc_state=True), VALUES)


@pytest.mark.parametrize(
    ("mode", "inside"), in_turn(list(RUNNERS), [False, True]), indirect=["mode"]
)
@pytest.mark.slow
def test_captured_tensors_and_variables_get_their_gradient(mode, inside):
    run, _ = mode

    def build(v, stacked):
        scale = tf.exp(v["bias0"][0])

        def cell(theta, state, inputs):
            factor = tf.exp(v["bias0"][0]) if inside else scale
            return lstm(theta, state, py_utils.NestedMap(x=factor * inputs.x))

        return build_stacked(v, cell_fns=cell) if stacked else build_plain(v, [cell] * LAYERS)

    want = run(functools.partial(build, stacked=False), VALUES)
    assert_equal(run(functools.partial(build, stacked=True), VALUES), want)


@pytest.mark.slow
def test_dropout_is_alike_on_any_devices_and_differs_in_time():
    def cell(theta, state, inputs):
        state1, _ = lstm(theta, state, inputs)
        state1.m = tf.nn.dropout(state1.m, 0.5)
        return state1, py_utils.NestedMap()

    def build(v, count):
        with plan_free_randomness(step=tf.constant(3, tf.int64)):
            return build_stacked(v, count, cell_fns=cell)

    want = run_tf2(functools.partial(build, count=1), VALUES)
    assert_equal(run_tf2(functools.partial(build, count=LAYERS), VALUES), want)
    kept = {(row != 0).tobytes() for row in np.array(want[0][0].x)}
    assert len(kept) == LENGTH


def test_the_callers_lists_stay_as_they_are():
    variables = {name: tf.constant(value) for name, value in VALUES.items()}
    thetas, states = thetas_of(variables), states_of(variables)
    saved = list(thetas), list(states)

    @tf.function(autograph=False)
    def run():
        return build_stacked(variables, thetas=thetas, init_states=states)[0]

    run()
    for now, before in zip((thetas, states), saved, strict=True):
        assert all(a is b for a, b in zip(now, before, strict=True))


@pytest.mark.slow
def test_every_layer_is_computed_on_its_device_in_both_passes():
    variables = {name: tf.Variable(value) for name, value in VALUES.items()}

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            loss = loss_of(build_stacked(variables, LAYERS))
        return tape.gradient(loss, variables)

    with record_placement() as graphs:
        run()
    nodes = [n for graph in graphs.partition_graphs for n in graph.node if "MatMul" in n.op]
    used = [node.device.rsplit(":", 1)[1] for node in nodes]
    counts = {device: used.count(device) for device in used}
    assert sorted(counts) == ["0", "1", "2"]
    assert len(set(counts.values())) == 1, counts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": ["CPU:0"] * 2}, "3 thetas.*2 devices"),
        ({"devices": []}, "at least one"),
        ({"cell_fns": [lstm] * 2}, "2 cell_fns.*3"),
        ({"cell_outs": [lstm_out] * 5}, "5 cell_outs.*3"),
        ({"accumulator_layers": [None]}, "1 accumulator_layers.*3"),
        ({"init_states": []}, "0 init_states.*3"),
        ({"inputs": py_utils.NestedMap()}, "inputs have no tensor"),
    ],
)
def test_lists_of_another_length_than_the_devices_are_errors(changes, message):
    with pytest.raises(PipelineError, match=message):
        run_tf2(functools.partial(build_stacked, **changes), VALUES)


@pytest.mark.slow
def test_results_and_gradients_equal_lingvos_stack():
    def cell(theta, state, inputs):
        # In lingvo no state may be an integer.
        state1, extras = lstm(theta, py_utils.NestedMap(**state, steps=0), inputs)
        del state1.steps
        return state1, extras

    def out_grad(d_out):
        return py_utils.NestedMap(c=tf.zeros_like(d_out.x), m=d_out.x)

    def build(v, stacked):
        states = [py_utils.NestedMap(c=v[f"c{i}"], m=v[f"m{i}"]) for i in range(LAYERS)]
        return build_stacked(
            v,
            stacked=stacked,
            # lingvo wants whole names.
            devices=[f"/job:localhost/replica:0/task:0/device:{d}" for d in devices_of(LAYERS)],
            cell_fns=cell,
            cell_out_grads=out_grad,
            init_states=states,
        )

    got = run_tf1(
        functools.partial(build, stacked=functools.partial(StackedRecurrent, num_chunks=2)), VALUES
    )
    want = run_tf1(functools.partial(build, stacked=lingvo_recurrent.StackedRecurrent), VALUES)
    assert_equal(got, want)
