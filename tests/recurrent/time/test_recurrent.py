"""Recurrent equals a plain loop over time, tensor by tensor, in every execution mode."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils, rnn_cell
from lingvo.core import recurrent as lingvo_recurrent

from pipemesh.errors import PipelineError
from pipemesh.layers.step_seed import whole_batch_randomness
from pipemesh.randomness import plan_free_randomness
from pipemesh.recurrent import Recurrent, Stage, pipeline
from pipemesh.schedule import gpipe
from tests.recurrent.time.runs import Meter, assert_equal, loss_of, run_eagerly, run_tf1, run_tf2

BATCH, WIDTH = 3, 4
RNG = np.random.default_rng(0)


def random(*shape):
    return RNG.normal(size=shape).astype(np.float32)


WEIGHTS = {
    "w": random(WIDTH, WIDTH),
    "u": random(WIDTH, WIDTH),
    "gates": random(2 * WIDTH, 4 * WIDTH),
    "bias": random(4 * WIDTH),
    "c": random(BATCH, WIDTH),
    "m": random(BATCH, WIDTH),
    "x": random(5, BATCH, WIDTH),
}


def elman(theta, state, inputs):
    m = tf.tanh(tf.matmul(state["m"], theta["w"]) + tf.matmul(inputs["x"], theta["u"]))
    return {"m": m, "count": state["count"] + 1}, ()


def lstm(theta, state, inputs):
    xm = tf.concat([inputs["x"], state["m"]], axis=1)
    z = tf.matmul(xm, theta["gates"]) + theta["bias"]
    i, f, o, g = tf.split(z, 4, axis=1)
    c = tf.sigmoid(f) * state["c"] + tf.sigmoid(i) * tf.tanh(g)
    return {"c": c, "m": tf.sigmoid(o) * tf.tanh(c)}, ()


def plain(theta, state0, inputs, cell_fn, return_acc_extras=False, steps=None):
    """The plain loop that Recurrent has to equal; other time steps than `steps` are skipped."""

    def stacked(parts):
        return tf.nest.map_structure(lambda *x: None if x[0] is None else tf.stack(x), *parts)

    states, all_extras, state = [], [], state0
    length = next(x.shape[0] for x in tf.nest.flatten(inputs) if x is not None)
    for t in range(length):
        if steps is not None and t not in steps:
            states.append(tf.nest.map_structure(tf.zeros_like, state0))
            continue
        x = tf.nest.map_structure(lambda x, t=t: None if x is None else x[t], inputs)
        state, extras = cell_fn(theta, state, x)
        states.append(state)
        all_extras.append(extras)
    results = stacked(states), state
    return (*results, stacked(all_extras)) if return_acc_extras else results


MODES = {"tf1": run_tf1, "tf2": run_tf2, "eager": run_eagerly}


@pytest.fixture(params=MODES)
def run(request):
    """A way to run, for what is recorded or read in another way in each of them."""
    return MODES[request.param]


# What does not depend on the way to run takes turns.
IN_TF1 = pytest.mark.parametrize("run", [run_tf1])
IN_TF2 = pytest.mark.parametrize("run", [run_tf2])


def assert_equals_plain(run, build, values):
    """Runs `build(recurrent, variables)` with Recurrent and with the plain loop."""
    want = run(functools.partial(build, plain), values)
    assert any(g is not None for g in want[1].values())
    assert_equal(run(functools.partial(build, Recurrent), values), want)


def chosen(*names, length=5):
    values = {name: WEIGHTS[name] for name in names}
    values["x"] = WEIGHTS["x"][:length]
    return values


def build_elman(recurrent, v):
    state0 = {"m": v["m"], "count": tf.constant(7)}
    return recurrent({"w": v["w"], "u": v["u"]}, state0, {"x": v["x"]}, elman)


def build_lstm(recurrent, v):
    theta = {"gates": v["gates"], "bias": v["bias"]}
    return recurrent(theta, {"c": v["c"], "m": v["m"]}, {"x": v["x"]}, lstm)


def test_an_elman_network_equals_the_plain_loop(run):
    assert_equals_plain(run, build_elman, chosen("w", "u", "m"))


@IN_TF1
def test_an_lstm_equals_the_plain_loop(run):
    for length in (1, 5):
        assert_equals_plain(run, build_lstm, chosen("gates", "bias", "c", "m", length=length))


def test_a_function_that_is_called_eagerly_has_its_gradient():
    variables = {name: tf.Variable(value) for name, value in chosen("w", "u", "m").items()}

    def grads(recurrent, persistent):
        call = tf.function(functools.partial(build_elman, recurrent), autograph=False)
        with tf.GradientTape(persistent=persistent) as tape:
            loss = loss_of(call(variables))
        return loss, tape.gradient(loss, variables)

    assert_equal(grads(Recurrent, False), grads(plain, False))


@IN_TF2
def test_nested_containers_and_none_keep_their_places(run):
    def cell(theta, state, inputs):
        assert theta["none"] is None and inputs[1] is None and state[0] is None
        h = state[1]["h"] * theta["list"][0] + inputs[0] + tf.cast(inputs[2], tf.float32)
        flag = tf.logical_not(state[1]["flag"])
        return (None, {"h": h, "flag": flag, "id": inputs[2] + state[1]["id"]}), {"e": None}

    def build(recurrent, v):
        theta = {"none": None, "list": [v["w"][0], tf.constant(3)], "unused": v["u"]}
        flag, number = tf.constant(True), tf.zeros([BATCH, 1], tf.int64)
        ids = tf.reshape(tf.range(5 * BATCH, dtype=tf.int64), [5, BATCH, 1])
        state0 = (None, {"h": v["m"], "flag": flag, "id": number})
        return recurrent(theta, state0, [v["x"], None, ids], cell)

    assert_equals_plain(run, build, chosen("w", "u", "m"))


@IN_TF2
def test_gradients_of_table_rows_are_summed_over_time(run):
    ids = np.array([[0, 2, 2], [1, 2, 0], [3, 3, 1], [0, 0, 0], [2, 1, 3]])

    def cell(theta, state, inputs):
        return {"m": tf.tanh(state["m"] + tf.gather(theta["table"], inputs["ids"]))}, ()

    def build(recurrent, v):
        return recurrent({"table": v["w"]}, {"m": v["m"]}, {"ids": tf.identity(ids)}, cell)

    assert_equals_plain(run, build, {k: WEIGHTS[k] for k in ("w", "m")})


def test_lengths_and_batches_may_be_dynamic():
    weights = {name: tf.Variable(WEIGHTS[name]) for name in ("gates", "bias")}

    def build(recurrent, c, m, x):
        with tf.GradientTape() as tape:
            tape.watch([c, m, x])
            results = recurrent(weights, {"c": c, "m": m}, {"x": x}, lstm)
            loss = loss_of(results)
        return *results, tape.gradient(loss, [*weights.values(), c, m, x])

    spec = tf.TensorSpec([None, WIDTH])
    signature = [spec, spec, tf.TensorSpec([None, None, WIDTH])]
    call = tf.function(functools.partial(build, Recurrent), signature, autograph=False)
    for length in (5, 1):
        given = [tf.constant(WEIGHTS[name]) for name in ("c", "m", "x")]
        given[2] = given[2][:length]
        tf.nest.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            call(*given),
            build(plain, *given),
        )
    acc_state, state, grads = call(*given[:2], given[2][:0])
    assert acc_state["c"].shape == [0, BATCH, WIDTH]
    np.testing.assert_array_equal(state["m"], WEIGHTS["m"])
    assert grads[4].shape == [0, BATCH, WIDTH]
    np.testing.assert_allclose(grads[3], 4 * np.cos(4 * WEIGHTS["m"]), rtol=1e-5)
    assert not np.any(grads[0]) and not np.any(grads[1])


def tanh_cell(theta, state, inputs):
    m = tf.tanh(tf.matmul(state["m"], theta["w"]) + inputs["x"])
    return {"m": m}, {"m1": m}


def tanh_cell_grad(theta, state, inputs, extras, d_state1):
    d_z = 3.0 * d_state1["m"] * (1.0 - extras["m1"] ** 2)
    d_m = tf.matmul(d_z, theta["w"], transpose_b=True)
    return {"w": tf.matmul(state["m"], d_z, transpose_a=True)}, {"m": d_m}, {"x": d_z}


@pytest.mark.parametrize(
    ("run", "extras"),
    [(run_eagerly, None), (run_tf2, {"m1": np.zeros([BATCH, WIDTH], np.float32)})],
)
def test_the_users_gradient_is_used_and_gets_the_extras(run, extras):
    @tf.custom_gradient
    def tripled(x):
        return tf.identity(x), lambda d: 3.0 * d

    def tripled_cell(theta, state, inputs):
        m = tf.tanh(tripled(tf.matmul(state["m"], theta["w"]) + inputs["x"]))
        return {"m": m}, {"m1": m}

    def build(recurrent, v):
        given = {"w": v["w"]}, {"m": v["m"]}, {"x": v["x"]}
        if recurrent is plain:
            return plain(*given, tripled_cell)
        return recurrent(*given, tanh_cell, tanh_cell_grad, extras=extras)

    assert_equals_plain(run, build, chosen("w", "m"))


@IN_TF1
def test_extras_over_time_are_returned_with_their_gradient(run):
    def build(recurrent, v):
        given = {"w": v["w"]}, {"m": v["m"]}, {"x": v["x"]}
        return recurrent(*given, tanh_cell, return_acc_extras=True)

    assert_equals_plain(run, build, chosen("w", "m"))


def test_what_the_users_gradient_leaves_out_has_none():
    w, x = tf.Variable(WEIGHTS["w"]), tf.Variable(WEIGHTS["x"])
    m = tf.constant(WEIGHTS["m"])

    def cell_grad(theta, state, inputs, extras, d_state1):
        _, d_state0, d_inputs = tanh_cell_grad(theta, state, inputs, extras, d_state1)
        return {"w": None}, d_state0, d_inputs, None

    with tf.GradientTape() as tape:
        _, state = Recurrent({"w": w}, {"m": m}, {"x": x}, tanh_cell, cell_grad)
    grad_w, grad_x = tape.gradient(state["m"], [w, x])
    assert grad_w is None and np.all(np.isfinite(grad_x)) and np.any(grad_x)


@IN_TF2
def test_stopping_leaves_the_rest_zero_and_without_gradient(run):
    steps = 3

    def build(recurrent, v):
        state0 = {"m": v["m"], "count": tf.constant(0)}
        theta = {"w": v["w"], "u": v["u"], "limit": tf.constant(steps)}
        if recurrent is plain:
            return plain(theta, state0, {"x": v["x"]}, elman, steps=range(steps))

        def stop(t, theta, state):
            # For each example; all have to agree.
            after = tf.stack([t >= 1, t >= tf.cast(theta["limit"], tf.int64)])
            return after & (state["count"] >= theta["limit"] - 1)

        return recurrent(theta, state0, {"x": v["x"]}, elman, stop_fn=stop)

    assert_equals_plain(run, build, chosen("w", "u", "m"))


@IN_TF2
def test_padding_at_both_ends_is_skipped(run):
    padding = np.ones([5, BATCH, 1], np.float32)
    padding[1:3, 0] = padding[2:4, 1] = 0

    def build(recurrent, v, dtype=tf.float32):
        theta = {"gates": v["gates"], "bias": v["bias"]}
        state0 = {"c": v["c"], "m": v["m"]}
        if recurrent is plain:
            return plain(theta, state0, {"x": v["x"]}, lstm, steps=range(1, 4))
        inputs = {"x": v["x"], "padding": tf.cast(padding, dtype)}
        return recurrent(theta, state0, inputs, lstm)

    values = chosen("gates", "bias", "c", "m")
    want = run(functools.partial(build, plain), values)
    assert_equal(run(functools.partial(build, Recurrent), values), want)
    assert_equal(run(functools.partial(build, Recurrent, dtype=tf.bool), values), want)
    padding[:] = 1
    (acc_state, state), _ = run(functools.partial(build, Recurrent), values)
    assert not np.any(acc_state["m"])
    np.testing.assert_array_equal(state["c"], WEIGHTS["c"])


@IN_TF1
def test_accumulators_go_from_step_to_step_and_have_no_gradient(run):
    def build(recurrent, v):
        meter = Meter()

        def cell(theta, state, inputs):
            total = meter.GetAccumulatorValues()["total"]
            meter.SetAccumulatorValues({"total": total + tf.reduce_sum(inputs["x"])})
            # The value found matters, and its gradient is cut.
            m = tf.tanh(state["m"] * theta["w"][0] + inputs["x"]) + tf.stop_gradient(total)
            return {"m": m}, ()

        given = {"w": v["w"]}, {"m": v["m"]}, {"x": v["x"]}, cell
        options = {} if recurrent is plain else {"accumulator_layer": meter}
        results = recurrent(*given, **options)
        return results, tf.stop_gradient(meter.values["total"])

    assert_equals_plain(run, build, chosen("w", "m"))


@IN_TF1
def test_allowed_captured_tensors_get_their_gradient(run):
    def build(recurrent, v, how="all"):
        scale, shift = 2.0 * v["u"], tf.constant(0.5)

        def cell(theta, state, inputs):
            m = tf.tanh(tf.matmul(state["m"], theta["w"] + scale) + shift * inputs["x"])
            return {"m": m}, ()

        given = {"w": v["w"]}, {"m": v["m"]}, {"x": v["x"]}, cell
        if recurrent is plain:
            return plain(*given)
        if how == "all":
            return recurrent(*given, allow_implicit_capture=True)
        return recurrent(*given, allowed_tensor_captures=[scale, shift])

    values = chosen("w", "u", "m")
    want = run(functools.partial(build, plain), values)
    for how in ("all", "some"):
        assert_equal(run(functools.partial(build, Recurrent, how=how), values), want)


def cell_with(body):
    """A cell that computes something else beside its state."""

    def cell(theta, state, inputs):
        return {"m": state["m"] * theta["w"] + body(state["m"])}, {"m1": state["m"]}

    return cell


def try_cell(cell, **options):
    w, m = tf.ones([WIDTH]), tf.ones([BATCH, WIDTH])
    return Recurrent({"w": w}, {"m": m}, {"x": tf.ones([5, BATCH])}, cell, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"allowed_tensor_captures": [tf.ones([2])]},
        {"allow_implicit_capture": True, "cell_grad": tanh_cell_grad},
    ],
)
@pytest.mark.parametrize("size", [WIDTH, 1000])
def test_captured_tensors_are_errors_where_they_are_not_allowed(options, size):
    outside = tf.ones([size])
    with pytest.raises(PipelineError, match=rf"not given: .*\({size},\).*allow_implicit_capture"):
        try_cell(cell_with(lambda m: m + outside[:WIDTH]), **options)


def test_variables_are_errors_where_they_are_not_allowed(run):
    def build(v):
        return try_cell(cell_with(lambda m: m + v["w"][0]))

    with pytest.raises(PipelineError, match=r"not given: .*(w|Variable).* pass them in theta"):
        run(build, {"w": WEIGHTS["w"]})


def test_variables_that_are_allowed_get_their_gradient(run):
    def build(v, theta):
        def cell(theta, state, inputs):
            weight = theta.get("w", v["w"])
            return {"m": tf.tanh(state["m"] * weight + inputs["x"])}, ()

        given = {"x": tf.linspace([-1.0], [1.0], 5)}
        _, final = Recurrent(
            theta(v), {"m": tf.ones([1])}, given, cell, allow_implicit_capture=True
        )
        return {"final": final["m"]}

    values = {"w": np.float32(0.7)}
    captured = run(lambda v: build(v, lambda v: {}), values)
    tf.nest.map_structure(
        np.testing.assert_allclose,
        captured,
        run(lambda v: build(v, lambda v: {"w": v["w"]}), values),
    )


def test_a_cell_reads_the_same_step_in_both_passes():
    step, w = tf.Variable(3, dtype=tf.int64, trainable=False), tf.Variable(2.0)

    def cell(theta, state, inputs):
        return {"m": state["m"] * theta["w"] * tf.cast(step, tf.float32)}, ()

    with tf.GradientTape() as tape:
        _, final = Recurrent({"w": w}, {"m": 1.0}, {"x": tf.zeros([2])}, cell)
    step.assign_add(1)
    assert float(final["m"]) == 36.0
    assert float(tape.gradient(final["m"], w)) == 36.0


def test_a_variable_that_a_branch_reads_is_an_error(run):
    def build(v):
        return try_cell(
            cell_with(lambda m: tf.cond(m[0, 0] > 0, lambda: m + v["w"][0], lambda: m)),
            allow_implicit_capture=True,
        )

    with pytest.raises(PipelineError, match=r"reads the variable .* in a branch or a loop"):
        run(build, {"w": WEIGHTS["w"]})


def test_a_variable_that_the_cell_writes_is_an_error():
    count = tf.Variable(0.0, trainable=False)

    def body(m):
        count.assign_add(1.0)
        return m

    with pytest.raises(PipelineError, match=r"AssignAddVariableOp operation.*accumulators"):
        try_cell(cell_with(body), allow_implicit_capture=True)


@pytest.mark.parametrize(
    ("body", "operation", "advice"),
    [
        (tf.random.normal, "RandomStandardNormal", "plan_free_randomness"),
        (lambda m: tf.nn.dropout(m, 0.5), "RandomUniform", "plan_free_randomness"),
        (
            lambda m: tf.cond(m[0, 0] > 0, lambda: tf.random.uniform([]), lambda: 0.0),
            "Uniform",
            "plan_free_randomness",
        ),
        (lambda m: tf.py_function(lambda x: x, [m], tf.float32), "EagerPyFunc", "numpy_function"),
    ],
)
def test_operations_with_state_are_errors_that_say_what_to_do(body, operation, advice):
    if body is tf.random.normal:
        body = lambda m: tf.random.normal([BATCH, WIDTH])  # noqa: E731
    with pytest.raises(PipelineError, match=rf"{operation} operation.*{advice}"):
        try_cell(cell_with(body))


def test_checks_are_kept_and_fail_at_the_step_that_breaks_them():
    def cell(theta, state, inputs):
        with tf.control_dependencies([tf.debugging.assert_less(inputs["x"], 2.0, "too large")]):
            return {"m": state["m"] + inputs["x"]}, ()

    call = tf.function(lambda x: Recurrent({}, {"m": 0.0}, {"x": x}, cell)[1]["m"], autograph=False)
    assert call(tf.constant([1.0, 1.5])) == 2.5
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        call(tf.constant([1.0, 3.0]))


@IN_TF2
def test_dropout_differs_by_step_and_is_recomputed_alike(run):
    def build(v, masks=None):
        def cell(theta, state, inputs):
            dropped = tf.nn.dropout(tf.ones([BATCH, WIDTH]), 0.5)
            mask = dropped if masks is None else inputs["mask"]
            return {"m": tf.tanh(tf.matmul(state["m"], theta["w"]) * mask + inputs["x"])}, mask

        given = {"w": v["w"]}, {"m": v["m"]}, {"x": v["x"]}
        if masks is None:
            with plan_free_randomness(step=tf.constant(3, tf.int64)):
                first = Recurrent(*given, cell, return_acc_extras=True)
                second = Recurrent(*given, cell, return_acc_extras=True)
            return *first[:2], tf.stop_gradient(first[2]), tf.stop_gradient(second[2])
        given[2]["mask"] = tf.constant(masks[0])
        results = plain(*given, cell)
        given[2]["mask"] = tf.constant(masks[1])
        return *results, tf.constant(masks[0]), tf.constant(masks[1])

    values = chosen("w", "m")
    got = run(build, values)
    masks = [np.array(mask) for mask in got[0][2:]]
    steps = {mask.tobytes() for both in masks for mask in both}
    assert len(steps) == 10, "masks repeat"
    assert_equal(got, run(functools.partial(build, masks=masks), values))


def test_seeds_of_lingvos_layers_differ_from_step_to_step_too():
    params = rnn_cell.LSTMCellSimple.Params()
    params.random_seed = 5

    def cell(theta, state, inputs):
        seeds = py_utils.GenerateStepSeedPair(params)
        return {"m": tf.random.stateless_uniform([BATCH, WIDTH], seeds)}, ()

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        py_utils.GetOrCreateGlobalStepVar()
        given = {}, {"m": tf.zeros([BATCH, WIDTH])}, {"x": tf.zeros([5])}
        with whole_batch_randomness():
            acc_state, _ = Recurrent(*given, cell)
        session.run(tf.compat.v1.global_variables_initializer())
        drawn = session.run(acc_state["m"])
        np.testing.assert_array_equal(session.run(acc_state["m"]), drawn)
        # Without keys they would repeat, since the cell is traced once.
        with pytest.raises(PipelineError, match=r"'global_step:0'.*plan_free_randomness"):
            Recurrent(*given, cell)
    assert len({step.tobytes() for step in drawn}) == 5


def test_a_network_compiled_by_xla_equals_the_plain_loop():
    variables = {name: tf.Variable(value) for name, value in chosen("w", "u", "m").items()}

    def run(recurrent, compile):
        @tf.function(autograph=False, jit_compile=compile)
        def call():
            with tf.GradientTape() as tape:
                results = build_elman(recurrent, variables)
                loss = loss_of(results)
            return results, tape.gradient(loss, variables)

        return call()

    assert_equal(run(Recurrent, True), run(plain, False), rtol=1e-4, atol=1e-4)


@IN_TF2
def test_a_recurrent_network_may_be_the_cell_of_another(run):
    def build(recurrent, v):
        def outer(theta, state, inputs):
            x = tf.stack([inputs["x"], 0.5 * inputs["x"]])
            _, inner = recurrent(theta, state, {"x": x}, elman)
            return inner, ()

        state0 = {"m": v["m"], "count": tf.constant(0)}
        return recurrent({"w": v["w"], "u": v["u"]}, state0, {"x": v["x"]}, outer)

    assert_equals_plain(run, build, chosen("w", "u", "m"))


def test_a_recurrent_net_with_dropout_may_be_a_stage():
    x = random(8, 5, WIDTH)
    w = tf.Variable(WEIGHTS["w"])

    def forward(theta, carry, inputs, microbatch, step):
        def cell(theta, state, inputs):
            z = tf.nn.dropout(tf.matmul(state["m"], theta["w"]), 0.5)
            return {"m": tf.tanh(z + inputs["x"])}, ()

        over_time = tf.transpose(inputs[0], [1, 0, 2])
        state0 = {"m": tf.zeros_like(over_time[0])}
        acc_state, _ = Recurrent({"w": theta[0]}, state0, {"x": over_time}, cell)
        return [tf.transpose(acc_state["m"], [1, 0, 2])], []

    @tf.function(autograph=False)
    def run(whole):
        step = tf.constant(4, tf.int64)
        with tf.GradientTape() as tape:
            if whole:
                with plan_free_randomness(step):
                    (y,), _ = forward([tf.identity(w)], [], [tf.constant(x)], None, step)
            else:
                stages = [Stage("rnn", forward, [tf.identity(w)], [], "CPU:0")]
                (y,), _ = pipeline(stages, [tf.constant(x)], gpipe(1, 4), step=step)
            loss = tf.reduce_sum(tf.sin(y))
        return y, tape.gradient(loss, w)

    for got, want in zip(run(False), run(True), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_graph_does_not_grow_and_keeps_only_states():
    def graph_of(length):
        @tf.function(autograph=False)
        def run(w, u, m, x):
            with tf.GradientTape() as tape:
                tape.watch(w)
                results = build_elman(Recurrent, {"w": w, "u": u, "m": m, "x": x})
                loss = loss_of(results)
            return tape.gradient(loss, w)

        given = [tf.constant(WEIGHTS[name]) for name in ("w", "u", "m")]
        return run.get_concrete_function(*given, tf.zeros([length, BATCH, WIDTH])).graph

    graphs = [graph_of(length).as_graph_def() for length in (4, 64)]
    sizes = [
        sum(len(nodes) for nodes in [g.node, *(f.node_def for f in g.library.function)])
        for g in graphs
    ]
    assert sizes[0] == sizes[1]
    # TensorFlow's own gradient of a loop keeps what each time step computes on such stacks.
    operations = {node.op for f in graphs[0].library.function for node in f.node_def}
    assert "TensorListSetItem" in operations and "TensorListPushBack" not in operations


def test_both_passes_are_computed_on_the_device_of_the_call():
    values = chosen("w", "u", "m")
    with tf.Graph().as_default():
        variables = {k: tf.compat.v1.get_variable(k, initializer=v) for k, v in values.items()}
        with tf.device("CPU:2"):
            results = build_elman(Recurrent, variables)
        grads = tf.gradients(loss_of(results), list(variables.values()))
        options = tf.compat.v1.RunOptions(output_partition_graphs=True)
        metadata = tf.compat.v1.RunMetadata()
        config = tf.compat.v1.ConfigProto(device_count={"CPU": 3})
        with tf.compat.v1.Session(config=config) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(grads, options=options, run_metadata=metadata)
    nodes = [node for graph in metadata.partition_graphs for node in graph.node]
    matmuls = [node.device for node in nodes if "MatMul" in node.op]
    # Two of the cell, twice; and four of its gradient. An Enter elsewhere is a loop over devices.
    assert len(matmuls) == 8
    assert all(d.endswith(":2") for d in matmuls)
    assert all(node.device.endswith(":2") for node in nodes if node.op == "Enter")


def test_a_gradient_of_the_gradient_is_an_error():
    x = tf.constant([1.0, 2.0])

    @tf.function(autograph=False)
    def second():
        _, state = Recurrent(
            {}, {"m": 1.0}, {"x": x}, lambda _, s, i: ({"m": s["m"] * tf.sin(i["x"])}, ())
        )
        (first,) = tf.gradients(state["m"], x)
        return tf.gradients(first, x)

    with pytest.raises(LookupError, match="no gradient of its gradient"):
        second()


def test_extras_beside_the_users_gradient_have_no_gradient():
    w = tf.Variable(WEIGHTS["w"])
    with tf.GradientTape() as tape:
        _, state, extras = Recurrent(
            {"w": w},
            {"m": WEIGHTS["m"]},
            {"x": WEIGHTS["x"]},
            tanh_cell,
            tanh_cell_grad,
            return_acc_extras=True,
        )
        loss = tf.reduce_sum(state["m"]) + tf.reduce_sum(extras["m1"])
    np.testing.assert_array_equal(extras["m1"][-1], state["m"])
    with pytest.raises(LookupError, match="takes no gradient of the extras"):
        tape.gradient(loss, w)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda m: {"m": m}, r"returned dict; it must return a pair"),
        (lambda m: ({"n": m}, ()), r"state1 must be nested as state0.* state0.m; it has state1.n"),
        (lambda m: ({"m": None}, ()), r"state1.m is None"),
        (lambda m: ({"m": m[0]}, ()), r"state1.m is float32 of shape \(4,\).*shape \(3, 4\)"),
        (lambda m: ({"m": tf.cast(m, tf.float16)}, ()), r"state1.m is float16 .*must be float32"),
    ],
)
def test_states_that_do_not_fit_are_errors_that_name_the_tensor(returned, message):
    with pytest.raises(PipelineError, match=message):
        try_cell(lambda theta, state, inputs: returned(state["m"]))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": tf.ones([2]), "y": tf.ones([3])}, r"inputs.x: 2, inputs.y: 3"),
        ({"x": tf.ones([])}, r"inputs.x has shape \(\)"),
        ({}, r"inputs have no tensor"),
    ],
)
def test_inputs_without_one_length_are_errors(inputs, message):
    with pytest.raises(PipelineError, match=message):
        Recurrent({}, {"m": 0.0}, inputs, lambda *_: ({"m": 0.0}, ()))


def test_lengths_that_turn_out_to_differ_are_errors():
    @tf.function(input_signature=[tf.TensorSpec([None])] * 2, autograph=False)
    def run(x, y):
        def cell(theta, state, inputs):
            return {"m": state["m"] + inputs["x"] * inputs["y"]}, ()

        return Recurrent({}, {"m": 0.0}, {"x": x, "y": y}, cell)[1]["m"]

    assert run(tf.ones([3]), tf.ones([3])) == 3
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"inputs.y has another length"):
        run(tf.ones([3]), tf.ones([2]))


def as_nested_map(value):
    return py_utils.NestedMap(value)


def lingvo_cell(theta, state0, inputs):
    state1, _ = lstm(theta, state0, inputs)
    keep = 1.0 - inputs.padding
    state1 = {k: keep * v + inputs.padding * state0[k] for k, v in state1.items()}
    return as_nested_map({**state1, "t": state0.t + 1}), py_utils.NestedMap(z=state1["c"])


@pytest.mark.parametrize("stopping", [False, True])
def test_results_and_gradients_are_those_of_lingvos_recurrent(stopping):
    padding = np.zeros([5, BATCH, 1], np.float32)
    padding[4] = padding[3, 0] = 1

    def build(recurrent, v):
        results = recurrent(
            as_nested_map({"gates": v["gates"], "bias": v["bias"]}),
            as_nested_map({"c": v["c"], "m": v["m"], "t": tf.constant(0)}),
            as_nested_map({"x": v["x"], "padding": tf.constant(padding)}),
            lingvo_cell,
            stop_fn=(lambda t, theta, state: state.t >= 3) if stopping else None,
        )
        assert all(isinstance(part, py_utils.NestedMap) for part in results)
        return tuple(results)

    values = chosen("gates", "bias", "c", "m")
    want = run_tf1(functools.partial(build, lingvo_recurrent.Recurrent), values)
    run = run_tf1 if stopping else run_tf2
    assert_equal(run(functools.partial(build, Recurrent), values), want)
