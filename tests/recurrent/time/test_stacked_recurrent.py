"""StackedRecurrent equals its layers one after the other, however the time is cut into chunks."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils
from lingvo.core import recurrent as lingvo_recurrent

from pipemesh.backend.graphs import record_placement
from pipemesh.backend.structure import Structure
from pipemesh.errors import PipelineError
from pipemesh.randomness import plan_free_randomness
from pipemesh.randomness.scope import WholeDraws
from pipemesh.recurrent import StackedRecurrent
from pipemesh.recurrent.passes.passes import Cuts
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.time.stacked_recurrent import LayerArguments, LayerStage
from tests.recurrent.time import runs
from tests.recurrent.time.runs import Meter, loss_of, lstm, run_tf1, run_tf2

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


assert_equal = functools.partial(runs.assert_equal, may_be_zero=True)


# A stack of two small layers.

LENGTH, BATCH, WIDTH = 7, 4, 3
RNG = np.random.default_rng(1)


def random(*shape):
    return RNG.normal(size=shape).astype(np.float32)


VALUES = {
    "w0": random(WIDTH, WIDTH),
    "w1": random(WIDTH, WIDTH),
    "m0": random(BATCH, WIDTH),
    "m1": random(BATCH, WIDTH),
    "x": random(LENGTH, BATCH, WIDTH),
}


def cell(theta, state, inputs):
    return {"m": tf.tanh(tf.matmul(inputs["x"] + state["m"], theta["w"]))}, ()


def out(state):
    return {"x": state["m"]}


def parts_of(v):
    return [{"w": v["w0"]}, {"w": v["w1"]}], [{"m": v["m0"]}, {"m": v["m1"]}]


def plain(v, cell_fns=cell, cell_outs=out, inputs=None, init_states=None, steps=range(LENGTH)):
    """Time outside, layers inside; other time steps than `steps` are skipped."""
    cells = cell_fns if isinstance(cell_fns, list) else [cell_fns] * 2
    outs = cell_outs if isinstance(cell_outs, list) else [cell_outs] * 2
    thetas, states = parts_of(v)
    inputs = inputs(v) if inputs else {"x": v["x"]}
    states = init_states(v) if init_states else states
    over_time = [tf.nest.map_structure(tf.zeros_like, states[-1])] * LENGTH
    for t in steps:
        x = {name: part[t] for name, part in inputs.items()}
        for i, (cell_fn, cell_out) in enumerate(zip(cells, outs, strict=True)):
            states[i], _ = cell_fn(thetas[i], states[i], x)
            x = cell_out(states[i])
        over_time[t] = states[-1]
    return outs[-1](tf.nest.map_structure(lambda *x: tf.stack(x), *over_time)), states


OF_VALUES = ("inputs", "init_states")


def stacked(v, **changes):
    """Inputs and states may be functions of the values."""
    thetas, init_states = parts_of(v)
    arguments = {
        "devices": ["CPU:0", "CPU:1"],
        "cell_fns": cell,
        "cell_grads": None,
        "cell_outs": out,
        "cell_out_grads": None,
        "thetas": thetas,
        "init_states": init_states,
        "inputs": {"x": v["x"]},
        "num_chunks": 2,
        **{k: f(v) if k in OF_VALUES and callable(f) else f for k, f in changes.items()},
    }
    return StackedRecurrent(**arguments)


@tf.custom_gradient
def tripled_gradient(x):
    return tf.identity(x), lambda d: 3.0 * d


IDS = RNG.integers(0, WIDTH, size=[LENGTH, BATCH]).astype(np.int32)
PADDING = np.ones([LENGTH, BATCH], bool)
PADDING[3:5, 1] = False


def reads_inputs(theta, state, inputs):
    return {"m": tf.tanh(tf.matmul(inputs["x"], theta["w"]))}, ()


def embedding(theta, state, inputs):
    return {"m": tf.gather(theta["w"], inputs["x"]) + 0.5 * state["m"]}, ()


def build_captures(v, stack=stacked):
    """Cells and `cell_outs` use tensors and variables that they are not given."""
    outside = tf.exp(v["m0"][0])

    def scaled(theta, state, inputs):
        return cell(theta, state, {"x": outside * tf.exp(v["m1"][0]) * inputs["x"]})

    def scaled_out(state):
        return {"x": outside * state["m"]}

    return stack(v, cell_fns=scaled, cell_outs=scaled_out)


def build_by_hand(v):
    """The gradient of the last layer's output is TensorFlow's, as in lingvo."""
    three = tf.add(v["w0"][0, 0] ** 2, 3.0) - v["w0"][0, 0] ** 2
    return stacked(v, cell_out_grads=lambda d: {"m": three * d["x"]})


def counting(theta, state, inputs):
    # No gradient is a sum of three, which TensorFlow adds up in any order.
    z = tf.matmul(inputs["x"] + state["m"] + 0.5 * state["c"], theta["w"])
    return {"m": tf.tanh(z), "c": tf.sin(z), "count": state["count"] + 1}, ()


def counted_states(v):
    return [{"m": v[f"m{i}"], "c": v[f"m{i}"][::-1], "count": tf.constant(10 * i)} for i in (0, 1)]


def case_of_integer_state(out_grad):
    """`cell_outs` leaves both the integer and a floating state out."""
    states = {"cell_fns": counting, "init_states": counted_states}
    return case({**states, "cell_out_grads": out_grad})


TRIPLED = [lambda state: {"x": tripled_gradient(state["m"])}, out]


def case(changes, plain_changes=None, run=run_tf2, loss=loss_of):
    same = {k: v for k, v in changes.items() if k in ("cell_fns", "cell_outs", *OF_VALUES)}
    want = functools.partial(plain, **{**same, **(plain_changes or {})})
    return run, functools.partial(stacked, **changes), want, loss


CASES = {
    "one device": case({"devices": ["CPU:0"] * 2, "num_chunks": None}, run=run_tf1),
    "default chunks": case({"num_chunks": None}),
    "full remat": case({"num_chunks": 3, "remat": "full"}),
    "captures in TF1": (run_tf1, build_captures, lambda v: build_captures(v, plain), loss_of),
    "captures": (run_tf2, build_captures, lambda v: build_captures(v, plain), loss_of),
    "outputs alone": case({}, loss=lambda results: loss_of(results[0])),
    # No gradient comes from the outputs, nor any to the layers above.
    "one final state": case({}, loss=lambda results: loss_of(results[1][0])),
    "gradients of outputs by hand": (
        run_tf2,
        build_by_hand,
        functools.partial(plain, cell_outs=TRIPLED),
        loss_of,
    ),
    "integer state": case_of_integer_state(None),
    "integer state by hand": case_of_integer_state(
        lambda d: {"m": d["x"], "c": None, "count": tf.constant(0)}
    ),
    # As in lingvo's pipeline of microbatches: the state is only what a layer hands on.
    "unused states": case({"cell_fns": reads_inputs, "unused_acc_state": True}),
    "integers and rows of a table": case(
        {"cell_fns": [embedding, cell], "inputs": lambda v: {"x": IDS}}
    ),
    "padding": case(
        {"inputs": lambda v: {"x": v["x"], "padding": PADDING}, "num_chunks": 4},
        {"steps": range(3, 5)},
    ),
    "padding alone": case(
        {"inputs": lambda v: {"x": v["x"], "padding": np.ones_like(PADDING)}, "num_chunks": 4},
        {"steps": range(0)},
    ),
}


@pytest.mark.parametrize(("run", "build", "want", "loss"), CASES.values(), ids=CASES)
def test_results_and_all_gradients_equal_the_plain_loop(run, build, want, loss):
    near = 1e-4 if build is build_by_hand else 1e-5
    assert_equal(run(build, VALUES, loss), run_tf2(want, VALUES, loss), rtol=near, atol=near)


def test_states_may_be_complex():
    values = {
        name: (value + 0.5j * value[::-1]).astype(np.complex64) for name, value in VALUES.items()
    }
    assert_equal(run_tf2(stacked, values), run_tf2(plain, values), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("out_grad", [None, lambda d: {"m": d["x"]}])
def test_extras_and_accumulators_go_through_many_chunks(out_grad):
    """The gradient by hand of the first layer is thrice what TensorFlow would derive."""

    def build(v, num_chunks):
        meters = [Meter(), Meter()]

        def cell_of(meter, gradient=tf.identity):
            def counting(theta, state, inputs):
                seen = meter.GetAccumulatorValues()["total"]
                meter.SetAccumulatorValues({"total": seen + 1.0})
                x = inputs["x"] * (1.0 + seen) + state["m"]
                m = tf.tanh(gradient(tf.matmul(x, theta["w"])))
                return {"m": m}, {"m": m, "seen": seen}

            return counting

        def cell_grad(theta, state, inputs, extras, d_state1):
            scale = 1.0 + extras["seen"]
            d_z = 3.0 * d_state1["m"] * (1.0 - extras["m"] ** 2)
            d_sum = tf.matmul(d_z, theta["w"], transpose_b=True)
            d_w = tf.matmul(inputs["x"] * scale + state["m"], d_z, transpose_a=True)
            return {"w": d_w}, {"m": d_sum}, {"x": d_sum * scale}

        if num_chunks is None:
            results = plain(v, [cell_of(meters[0], tripled_gradient), cell_of(meters[1])])
        else:
            results = stacked(
                v,
                cell_fns=list(map(cell_of, meters)),
                cell_grads=[cell_grad, None],
                cell_out_grads=out_grad,
                # Any iterable will do.
                accumulator_layers=dict(enumerate(meters)).values(),
                num_chunks=num_chunks,
            )
        return results, [tf.stop_gradient(meter.values["total"]) for meter in meters]

    want = run_tf1(functools.partial(build, num_chunks=None), VALUES)
    assert want[0][1] == [LENGTH, LENGTH]
    assert_equal(run_tf1(functools.partial(build, num_chunks=LENGTH), VALUES), want)


@pytest.mark.slow
def test_dropout_is_alike_on_any_devices_and_differs_in_time():
    def dropped(theta, state, inputs):
        state1, _ = cell(theta, state, inputs)
        return {"m": tf.nn.dropout(state1["m"], 0.5)}, ()

    def build(v, devices):
        with plan_free_randomness(step=tf.constant(3, tf.int64)):
            return stacked(v, devices=devices, num_chunks=None, cell_fns=dropped)

    want = run_tf2(functools.partial(build, devices=["CPU:0"] * 2), VALUES)
    assert_equal(run_tf2(functools.partial(build, devices=["CPU:0", "CPU:1"]), VALUES), want)
    kept = {(row != 0).tobytes() for row in np.array(want[0][0]["x"])}
    assert len(kept) == LENGTH


@pytest.mark.slow
def test_every_layer_is_computed_on_its_device_in_both_passes():
    variables = {name: tf.Variable(value) for name, value in VALUES.items()}

    @tf.function(autograph=False)
    def run():
        with tf.GradientTape() as tape:
            loss = loss_of(stacked(variables))
        return tape.gradient(loss, variables)

    with record_placement() as graphs:
        run()
    nodes = [n for graph in graphs.partition_graphs for n in graph.node if "MatMul" in n.op]
    used = [node.device.rsplit(":", 1)[1] for node in nodes]
    counts = {device: used.count(device) for device in used}
    assert sorted(counts) == ["0", "1"]
    assert len(set(counts.values())) == 1, counts


@pytest.mark.slow
def test_the_graph_does_not_grow_with_length_or_chunks():
    def size(length, num_chunks):
        @tf.function(autograph=False)
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = loss_of(stacked({**VALUES, "x": x}, num_chunks=num_chunks))
            return tape.gradient(loss, x)

        spec = tf.TensorSpec([length, BATCH, WIDTH])
        graph = run.get_concrete_function(spec).graph.as_graph_def()
        return len(graph.node) + sum(len(f.node_def) for f in graph.library.function)

    assert size(6000, 3000) == size(600, 100)


def test_without_time_steps_states_stay_the_initial_ones():
    values = {**VALUES, "x": VALUES["x"][:0]}
    build = functools.partial(stacked, num_chunks=None)
    (output, states), grads = run_tf2(build, values)
    assert output["x"].shape == (0, BATCH, WIDTH)
    np.testing.assert_array_equal(states[1]["m"], VALUES["m1"])
    assert np.all(np.abs(grads["m0"]) > 0) and grads["x"].shape == (0, BATCH, WIDTH)


def test_gradients_of_half_precision_are_summed_in_float32():
    """1/256 is lost beside 1 in bfloat16, be it from step to step or from chunk to chunk."""
    x = np.ones([513, 1], np.float32) / 256
    x[0] = 1.0

    def multiply(theta, state, inputs):
        return {"m": theta["w"] * inputs["x"]}, ()

    @tf.function(autograph=False)
    def run(weight):
        with tf.GradientTape() as tape:
            tape.watch(weight)
            state = {"m": tf.zeros([1], tf.bfloat16)}
            inputs = {"x": tf.cast(x, tf.bfloat16)}
            output, states = StackedRecurrent(
                *(["CPU:0"], multiply, None, out, None, [{"w": weight}], [state], inputs),
                num_chunks=27,
            )
            assert len(states) == 1
        return tape.gradient(output["x"], weight)

    assert float(run(tf.ones([], tf.bfloat16))) == 3.0


ONE, OUTSIDE = Meter(), tf.ones([1000])


def capturing_out(state):
    return {"x": OUTSIDE[0] * state["m"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_chunks": 0}, "num_chunks is 0; 7 time steps"),
        ({"num_chunks": 8}, "num_chunks is 8; 7 time steps can be cut into 1 to 7"),
        ({"remat": "some"}, "remat is 'some'"),
        ({"unused_acc_state": True}, r"depends on init_states\[0\]\.m; leave"),
        ({"accumulator_layers": [ONE, ONE]}, "same layer twice"),
        ({"accumulator_layers": ONE}, "accumulator_layers is Meter; it must be a list of 2"),
        ({"accumulator_layers": [None]}, "1 accumulator_layers.*2"),
        ({"devices": ["CPU:0"] * 3}, "2 thetas.*3 devices"),
        ({"devices": []}, "at least one"),
        ({"cell_fns": [cell] * 3}, "3 cell_fns.*2"),
        ({"cell_outs": [out]}, "1 cell_outs.*2"),
        ({"thetas": {"w": 1.0}}, "thetas is dict; it must be a list of 2"),
        ({"init_states": []}, "0 init_states.*2"),
        ({"init_states": [{}, {}]}, r"init_states\[0\] has no tensor"),
        ({"cell_outs": lambda state: {}}, r"cell_outs\[0\] returned no tensor"),
        ({"cell_out_grads": lambda d: {"c": d["x"]}}, r"the gradient of cell_outs\[0\] returned"),
        ({"inputs": {}}, "inputs have no tensor"),
        ({"inputs": {"x": VALUES["x"], "y": VALUES["x"][1:]}}, "differ in dim 0.*x: 7.*y: 6"),
        ({"inputs": {"x": 1.0}}, r"inputs.x has shape \(\)"),
        (
            {"cell_outs": capturing_out, "cell_out_grads": lambda d: {"m": d["x"]}},
            r"cell_outs\[0\] uses tensors",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_before_anything_runs(changes, message):
    with pytest.raises(PipelineError, match=message):
        run_tf2(functools.partial(stacked, **changes), VALUES)


def test_eager_calls_and_dynamic_lengths_are_errors():
    with pytest.raises(PipelineError, match=r"inside a tf\.function"):
        stacked(VALUES)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, BATCH, WIDTH])])
    def run(x):
        return stacked({**VALUES, "x": x})

    with pytest.raises(PipelineError, match=r"inputs\.x has shape \(None, 4, 3\).*ensure_shape"):
        run.get_concrete_function()


# LSTMs of lingvo's containers on fewer devices.

LAYERS = 3
LSTM_VALUES = {
    **{f"gates{i}": random(2 * WIDTH, 4 * WIDTH) for i in range(LAYERS)},
    **{f"c{i}": random(BATCH, WIDTH) for i in range(LAYERS)},
    **{f"m{i}": random(BATCH, WIDTH) for i in range(LAYERS)},
    "x": VALUES["x"][:4],
}


def lstm_out(state):
    return py_utils.NestedMap(x=state.m)


def lstm_out_grad(d_out):
    return py_utils.NestedMap(c=tf.zeros_like(d_out.x), m=d_out.x)


@pytest.mark.slow
def test_results_and_gradients_equal_lingvos_stack():
    def build(v, stack):
        lists = [
            # lingvo wants whole names.
            [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in (0, 0, 1)],
            *([lstm] * LAYERS, [None] * LAYERS, [lstm_out] * LAYERS, [lstm_out_grad] * LAYERS),
            [py_utils.NestedMap(gates=v[f"gates{i}"]) for i in range(LAYERS)],
            [py_utils.NestedMap(c=v[f"c{i}"], m=v[f"m{i}"]) for i in range(LAYERS)],
        ]
        saved = list(map(list, lists))
        output, states = stack(*lists, py_utils.NestedMap(x=v["x"]))
        if stack is not lingvo_recurrent.StackedRecurrent:
            assert list(map(list, lists)) == saved, "the caller's lists have changed"
        assert isinstance(output, py_utils.NestedMap)
        return output, list(states)

    ours = functools.partial(build, stack=functools.partial(StackedRecurrent, num_chunks=2))
    theirs = functools.partial(build, stack=lingvo_recurrent.StackedRecurrent)
    assert_equal(run_tf1(ours, LSTM_VALUES), run_tf1(theirs, LSTM_VALUES))
