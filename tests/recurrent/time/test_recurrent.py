"""Recurrent equals a plain loop over time, tensor by tensor, in every execution mode."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils, rnn_cell
from lingvo.core import recurrent as lingvo_recurrent

from pipemesh.errors import GradientError, PipelineError
from pipemesh.layers.step_seed import whole_batch_randomness
from pipemesh.randomness import plan_free_randomness
from pipemesh.recurrent import Recurrent, Stage, pipeline
from pipemesh.schedule import gpipe
from tests.recurrent.time.runs import (
    Meter,
    assert_equal,
    loss_of,
    lstm,
    run_eagerly,
    run_tf1,
    run_tf2,
)

LENGTH, BATCH, WIDTH = 5, 3, 4
RNG = np.random.default_rng(0)


def random(*shape):
    return RNG.normal(size=shape).astype(np.float32)


VALUES = {
    "w": random(WIDTH, WIDTH),
    "m": random(BATCH, WIDTH),
    "x": random(LENGTH, BATCH, WIDTH),
}
MORE_VALUES = {
    **VALUES,
    "u": random(WIDTH, WIDTH),
    "bias": random(WIDTH),
    "table": random(WIDTH, WIDTH),
    "unused": random(WIDTH),
}
IDS = np.array([[0, 2, 2], [1, 2, 0], [3, 3, 1], [0, 0, 0], [2, 1, 3]])


def plain(theta, state0, inputs, cell_fn, return_acc_extras=False, steps=range(LENGTH)):
    """The plain loop that Recurrent has to equal; other time steps than `steps` are skipped."""

    def each(function, *values):
        return tf.nest.map_structure(lambda *x: None if x[0] is None else function(*x), *values)

    length = next(x.shape[0] for x in tf.nest.flatten(inputs) if x is not None)
    over_time, state, extras = {}, state0, ()
    for t in steps[:length]:
        state, extras = cell_fn(theta, state, each(lambda x, t=t: x[t], inputs))
        over_time[t] = state, extras
    skipped = each(tf.zeros_like, (state, extras))
    parts = [over_time.get(t, skipped) for t in range(length)]
    acc_state, acc_extras = each(lambda *x: tf.stack(x), *parts)
    return (acc_state, state, acc_extras) if return_acc_extras else (acc_state, state)


def build_all(recurrent, v, listed=False, padding=None, stops=False):
    """A cell with tensors of every kind, some of which it is not given."""
    meter = Meter()
    scale, shift = 0.5 * v["u"], tf.constant(0.5)
    # A variable that the cell itself reads, or its value.
    bias = tf.identity(v["bias"]) if listed else v["bias"]

    def cell(theta, state, inputs):
        assert theta["none"] is None and inputs["none"] is None and state[0] is None
        total = meter.GetAccumulatorValues()["total"]
        meter.SetAccumulatorValues({"total": total + tf.reduce_sum(inputs["x"])})
        z = tf.matmul(state[1]["m"], theta["list"][0] + scale) + shift * inputs["x"] + bias
        z += tf.gather(theta["table"], inputs["ids"])
        # The value found matters, and its gradient is cut.
        m = tf.tanh(z + 0.1 * tf.stop_gradient(total))
        flag, count = tf.logical_not(state[1]["flag"]), state[1]["count"] + inputs["ids"]
        return (None, {"m": m, "flag": flag, "count": count}), {"z": z, "none": None}

    def stop(t, theta, state):
        # For each example; all have to agree.
        return tf.stack([t >= 0, t >= tf.cast(theta["list"][1], tf.int64)]) & state[1]["flag"]

    theta = {"none": None, "list": [v["w"], tf.constant(1)], "table": v["table"], "u": v["unused"]}
    state0 = (None, {"m": v["m"], "flag": tf.constant(True), "count": tf.zeros([BATCH], tf.int64)})
    inputs = {"x": v["x"], "none": None, "ids": tf.constant(IDS)}
    if padding is not None:
        inputs["padding"] = tf.constant(padding)
    if recurrent is plain:
        steps = range(2) if stops else range(LENGTH) if padding is None else range(1, 4)
        results = plain(theta, state0, inputs, cell, True, steps)
    else:
        results = recurrent(
            *(theta, state0, inputs, cell),
            stop_fn=stop if stops else None,
            accumulator_layer=meter,
            allow_implicit_capture=not listed,
            allowed_tensor_captures=[scale, shift, bias] if listed else None,
            return_acc_extras=True,
        )
    return results, tf.stop_gradient(meter.values["total"])


@functools.cache
def expected(stops, is_padded):
    padding = PADDING if is_padded else None
    build = functools.partial(build_all, plain, padding=padding, stops=stops)
    return run_tf2(build, MORE_VALUES)


def run_outside(build, values):
    """The gradient of a function that is called eagerly."""
    return run_eagerly(tf.function(build, autograph=False), values)


run_xla = functools.partial(run_tf2, jit_compile=True)
PADDING = np.ones([LENGTH, BATCH, 1], np.float32)
PADDING[1:3, 0] = PADDING[2:4, 1] = 0


@pytest.mark.parametrize(
    ("run", "options"),
    [
        (run_tf1, {}),
        (run_tf2, {}),
        (run_eagerly, {}),
        (run_outside, {}),
        (run_xla, {}),
        (run_tf1, {"listed": True}),
        (run_tf2, {"stops": True}),
        (run_tf2, {"padding": PADDING}),
        (run_tf2, {"padding": PADDING != 0}),
    ],
)
def test_results_and_all_gradients_equal_the_plain_loop(run, options):
    want = expected("stops" in options, "padding" in options)
    assert sum(grad is None for grad in want[1].values()) == 1
    got = run(functools.partial(build_all, Recurrent, **options), MORE_VALUES)
    near = 1e-4 if run is run_xla else 1e-5
    assert_equal(got, want, rtol=near, atol=near)


def tanh_cell(theta, state, inputs):
    m = tf.tanh(tf.matmul(state["m"], theta["w"]) + inputs["x"])
    return {"m": m}, {"m1": m}


def tanh_cell_grad(theta, state, inputs, extras, d_state1):
    d_z = 3.0 * d_state1["m"] * (1.0 - extras["m1"] ** 2)
    d_m = tf.matmul(d_z, theta["w"], transpose_b=True)
    return {"w": tf.matmul(state["m"], d_z, transpose_a=True)}, {"m": d_m}, {"x": d_z}


def build_tanh(recurrent, v, cell=tanh_cell, **options):
    return recurrent({"w": v["w"]}, {"m": v["m"]}, {"x": v["x"]}, cell, **options)


def test_lengths_and_batches_may_be_dynamic():
    def build(recurrent, *given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            results = build_tanh(recurrent, dict(zip(VALUES, given, strict=True)))
            loss = loss_of(results)
        return *results, tape.gradient(loss, given)

    specs = [tf.TensorSpec([None] * (x.ndim - 1) + [WIDTH]) for x in VALUES.values()]
    call = tf.function(functools.partial(build, Recurrent), specs, autograph=False)
    w, m, x = map(tf.constant, VALUES.values())
    for length in (LENGTH, 1):
        tf.nest.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            call(w, m, x[:length]),
            build(plain, w, m, x[:length]),
        )
    acc_state, state, grads = call(w, m, x[:0])
    assert acc_state["m"].shape == grads[2].shape == [0, BATCH, WIDTH]
    np.testing.assert_array_equal(state["m"], m)
    np.testing.assert_allclose(grads[1], 2 * np.cos(2 * m), rtol=1e-5)
    assert not np.any(grads[0])


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

    want = run(lambda v: build_tanh(plain, v, tripled_cell), VALUES)
    got = run(lambda v: build_tanh(Recurrent, v, cell_grad=tanh_cell_grad, extras=extras), VALUES)
    assert_equal(got, want)


def test_what_the_users_gradient_leaves_out_and_the_extras_beside_it_have_none():
    def cell_grad(*arguments):
        _, d_state0, d_inputs = tanh_cell_grad(*arguments)
        return {"w": None}, d_state0, d_inputs, None

    v = {name: tf.Variable(value) for name, value in VALUES.items()}
    with tf.GradientTape(persistent=True) as tape:
        _, state, extras = build_tanh(Recurrent, v, cell_grad=cell_grad, return_acc_extras=True)
    grad_w, grad_x = tape.gradient(state["m"], [v["w"], v["x"]])
    assert grad_w is None and np.all(np.isfinite(grad_x)) and np.any(grad_x)
    np.testing.assert_array_equal(extras["m1"][-1], state["m"])
    with pytest.raises(LookupError, match="takes no gradient of the extras"):
        tape.gradient(extras["m1"], v["w"])


SMALL, LARGE = tf.ones([WIDTH]), tf.ones([1000])
COUNT = tf.Variable(0.0, trainable=False)


def cell_with(body):
    """A cell that computes something else beside its state."""

    def cell(theta, state, inputs):
        return {"m": state["m"] * theta["w"] + body(state["m"])}, {"m1": state["m"]}

    return cell


def returning(result):
    return lambda theta, state, inputs: result(state["m"])


def counting(m):
    COUNT.assign_add(1.0)
    return m


def not_given(size):
    return rf"not given: .*\({size},\).*allow_implicit_capture"


def try_cell(cell, **options):
    given = {"w": tf.ones([WIDTH])}, {"m": tf.ones([BATCH, WIDTH])}
    return Recurrent(*given, options.pop("inputs", {"x": tf.ones([5, BATCH])}), cell, **options)


@pytest.mark.parametrize(
    ("cell", "options", "message"),
    [
        # TensorFlow makes constants of small ones.
        (cell_with(lambda m: m + SMALL), {}, not_given(WIDTH)),
        (cell_with(lambda m: m + LARGE[:WIDTH]), {}, not_given(1000)),
        (
            cell_with(lambda m: m + SMALL),
            {"allow_implicit_capture": True, "allowed_tensor_captures": [tf.ones([2])]},
            not_given(WIDTH),
        ),
        (
            cell_with(lambda m: m + LARGE[:WIDTH]),
            {"allow_implicit_capture": True, "cell_grad": tanh_cell_grad},
            not_given(1000),
        ),
        (
            cell_with(counting),
            {"allow_implicit_capture": True},
            "AssignAddVariableOp operation.*accumulators",
        ),
        (
            cell_with(lambda m: tf.random.normal([BATCH, WIDTH])),
            {},
            "RandomStandardNormal operation.*plan_free_randomness",
        ),
        (
            cell_with(lambda m: tf.nn.dropout(m, 0.5)),
            {},
            "RandomUniform operation.*plan_free_randomness",
        ),
        (
            cell_with(lambda m: tf.cond(m[0, 0] > 0, lambda: tf.random.uniform([]), lambda: 0.0)),
            {},
            "Uniform operation.*plan_free_randomness",
        ),
        (
            cell_with(lambda m: tf.py_function(lambda x: x, [m], tf.float32)),
            {},
            "EagerPyFunc operation.*numpy_function",
        ),
        (returning(lambda m: {"m": m}), {}, "returned dict; it must return a pair"),
        (
            returning(lambda m: ({"n": m}, ())),
            {},
            r"state1 must be nested as state0.* state0.m; it has state1.n",
        ),
        (returning(lambda m: ({"m": None}, ())), {}, r"state1.m is None"),
        (
            returning(lambda m: ({"m": m[0]}, ())),
            {},
            r"state1.m is float32 of shape \(4,\).*shape \(3, 4\)",
        ),
        (
            returning(lambda m: ({"m": tf.cast(m, tf.float16)}, ())),
            {},
            r"state1.m is float16 .*must be float32",
        ),
        (None, {"inputs": {"x": tf.ones([2]), "y": tf.ones([3])}}, "inputs.x: 2, inputs.y: 3"),
        (None, {"inputs": {"x": tf.ones([])}}, r"inputs.x has shape \(\)"),
        (None, {"inputs": {}}, "inputs have no tensor"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_what_to_do(cell, options, message):
    with pytest.raises(PipelineError, match=message):
        try_cell(cell, **options)


@pytest.mark.parametrize("run", [run_tf1, run_tf2, run_eagerly])
def test_variables_that_are_not_given_are_errors_and_so_are_those_that_a_branch_reads(run):
    def outside(v):
        return try_cell(cell_with(lambda m: m + v["w"][0]))

    def in_branch(v):
        return try_cell(
            cell_with(lambda m: tf.cond(m[0, 0] > 0, lambda: m + v["w"][0], lambda: m)),
            allow_implicit_capture=True,
        )

    for build, message in [
        (outside, r"not given: .*(w|Variable).* pass them in theta"),
        (in_branch, r"reads the variable .* in a branch or a loop"),
    ]:
        with pytest.raises(PipelineError, match=message):
            run(build, {"w": VALUES["w"]})


def test_a_cell_reads_the_same_step_in_both_passes():
    step, w = tf.Variable(3, dtype=tf.int64, trainable=False), tf.Variable(2.0)

    def cell(theta, state, inputs):
        return {"m": state["m"] * theta["w"] * tf.cast(step, tf.float32)}, ()

    with tf.GradientTape() as tape:
        _, final = Recurrent({"w": w}, {"m": 1.0}, {"x": tf.zeros([2])}, cell)
    step.assign_add(1)
    assert float(final["m"]) == 36.0
    assert float(tape.gradient(final["m"], w)) == 36.0


def test_checks_are_kept_and_fail_at_the_step_that_breaks_them():
    def cell(theta, state, inputs):
        with tf.control_dependencies([tf.debugging.assert_less(inputs["x"], 2.0, "too large")]):
            return {"m": state["m"] + inputs["x"]}, ()

    call = tf.function(lambda x: Recurrent({}, {"m": 0.0}, {"x": x}, cell)[1]["m"], autograph=False)
    assert call(tf.constant([1.0, 1.5])) == 2.5
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        call(tf.constant([1.0, 3.0]))


def test_dropout_differs_by_step_and_is_recomputed_alike():
    def build(v, masks=None):
        def cell(theta, state, inputs):
            dropped = tf.nn.dropout(tf.ones([BATCH, WIDTH]), 0.5)
            mask = dropped if masks is None else inputs["mask"]
            return {"m": tf.tanh(tf.matmul(state["m"], theta["w"]) * mask + inputs["x"])}, mask

        if masks is None:
            with plan_free_randomness(step=tf.constant(3, tf.int64)):
                *results, mask = build_tanh(Recurrent, v, cell, return_acc_extras=True)
                *_, other = build_tanh(Recurrent, v, cell, return_acc_extras=True)
            return *results, tf.stop_gradient(mask), tf.stop_gradient(other)
        inputs = {"x": v["x"], "mask": tf.constant(masks[0])}
        results = plain({"w": v["w"]}, {"m": v["m"]}, inputs, cell)
        return *results, *map(tf.constant, masks)

    got = run_tf2(build, VALUES)
    masks = [np.array(mask) for mask in got[0][2:]]
    assert len({mask.tobytes() for both in masks for mask in both}) == 10, "masks repeat"
    assert_equal(got, run_tf2(functools.partial(build, masks=masks), VALUES))


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


def test_a_recurrent_network_may_be_the_cell_of_another():
    def build(v, recurrent):
        def outer(theta, state, inputs):
            x = tf.stack([inputs["x"], 0.5 * inputs["x"]])
            return recurrent(theta, state, {"x": x}, tanh_cell)[1], ()

        return build_tanh(recurrent, v, outer)

    got, want = (
        run_tf2(functools.partial(build, recurrent=recurrent), VALUES)
        for recurrent in (Recurrent, plain)
    )
    assert_equal(got, want)


def test_a_recurrent_net_with_dropout_may_be_a_stage():
    x = random(8, 5, WIDTH)
    w = tf.Variable(VALUES["w"])

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


def test_the_graph_keeps_only_states():
    @tf.function(autograph=False)
    def run(v):
        results = build_tanh(Recurrent, v)
        return tf.gradients(loss_of(results), v["w"])

    library = run.get_concrete_function(VALUES).graph.as_graph_def().library
    operations = {node.op for f in library.function for node in f.node_def}
    # TensorFlow's own gradient of a loop keeps what each time step computes by pushing it.
    assert "TensorListSetItem" in operations and "TensorListPushBack" not in operations


def test_both_passes_are_computed_on_the_device_of_the_call():
    with tf.Graph().as_default():
        variables = {k: tf.compat.v1.get_variable(k, initializer=v) for k, v in VALUES.items()}
        with tf.device("CPU:2"):
            results = build_tanh(Recurrent, variables)
        grads = tf.gradients(loss_of(results), list(variables.values()))
        options = tf.compat.v1.RunOptions(output_partition_graphs=True)
        metadata = tf.compat.v1.RunMetadata()
        config = tf.compat.v1.ConfigProto(device_count={"CPU": 3})
        with tf.compat.v1.Session(config=config) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(grads, options=options, run_metadata=metadata)
    nodes = [node for graph in metadata.partition_graphs for node in graph.node]
    matmuls = [node.device for node in nodes if "MatMul" in node.op]
    # One of the cell, twice; and two of its gradient. An Enter elsewhere is a loop over devices.
    assert len(matmuls) == 4
    assert all(d.endswith(":2") for d in matmuls)
    assert all(node.device.endswith(":2") for node in nodes if node.op == "Enter")


def by_tapes(loss, x):
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(x)
        first = tape.gradient(value, x)
    return outer.gradient(first, x)


def by_tf_gradients(loss, x):
    (first,) = tf.gradients(loss(x), x)
    return tf.gradients(first, x)


def of_a_function(loss, x):
    return by_tapes(tf.function(loss, autograph=False), x)


@pytest.mark.parametrize("way", [by_tapes, of_a_function])
@pytest.mark.parametrize("mode", ["eagerly", "in a function", "in TF1"])
def test_a_gradient_of_the_gradient_is_an_error(way, mode):
    """Eagerly it was None, as of a gradient that does not depend on anything."""

    def loss(x):
        _, state = Recurrent(
            {}, {"m": 1.0}, {"x": x}, lambda _, s, i: ({"m": s["m"] * tf.sin(i["x"])}, ())
        )
        return state["m"]

    def run():
        x = tf.constant([1.0, 2.0])
        ways = [way] if tf.executing_eagerly() else [way, by_tf_gradients]
        for each in ways:
            with pytest.raises(GradientError, match="second derivatives of Recurrent do not exist"):
                each(loss, x)

    if mode == "in a function":
        tf.function(run, autograph=False)()
    elif mode == "in TF1":
        with tf.Graph().as_default():
            run()
    else:
        run()


def test_lengths_that_turn_out_to_differ_are_errors():
    @tf.function(input_signature=[tf.TensorSpec([None])] * 2, autograph=False)
    def run(x, y):
        def cell(theta, state, inputs):
            return {"m": state["m"] + inputs["x"] * inputs["y"]}, ()

        return Recurrent({}, {"m": 0.0}, {"x": x, "y": y}, cell)[1]["m"]

    assert run(tf.ones([3]), tf.ones([3])) == 3
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"inputs.y has another length"):
        run(tf.ones([3]), tf.ones([2]))


def lingvo_cell(theta, state0, inputs):
    state1, _ = lstm(theta, state0, inputs)
    keep, z = 1.0 - inputs.padding, state1.c
    state1 = {k: keep * v + inputs.padding * state0[k] for k, v in state1.items()}
    return py_utils.NestedMap(t=state0.t + 1, **state1), py_utils.NestedMap(z=z)


@pytest.mark.parametrize("stops", [False, True])
def test_results_and_gradients_are_those_of_lingvos_recurrent(stops):
    padding = np.zeros([LENGTH, BATCH, 1], np.float32)
    padding[4] = padding[3, 0] = 1

    def build(recurrent, v):
        results = recurrent(
            py_utils.NestedMap(gates=v["gates"]),
            py_utils.NestedMap(c=v["c"], m=v["m"], t=tf.constant(0)),
            py_utils.NestedMap(x=v["x"], padding=tf.constant(padding)),
            lingvo_cell,
            stop_fn=(lambda t, theta, state: state.t >= 3) if stops else None,
        )
        assert all(isinstance(part, py_utils.NestedMap) for part in results)
        return tuple(results)

    values = {
        **VALUES,
        "c": random(BATCH, WIDTH),
        "gates": random(2 * WIDTH, 4 * WIDTH),
    }
    del values["w"]
    want = run_tf1(functools.partial(build, lingvo_recurrent.Recurrent), values)
    assert_equal(run_tf1(functools.partial(build, Recurrent), values), want)
