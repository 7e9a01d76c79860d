"""What a stage does besides computing: assertions, prints and summaries; nothing else."""

import re

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent import Options, Stage, pipeline, pipeline_loss
from pipemesh.schedule import gpipe, one_f_one_b

X = np.arange(8, dtype=np.float32)


def loss_of(body, schedule=None, **options):
    """The loss and the gradient of the weight of two stages, the first of which runs `body`.

    What `body` gets depends on the weight, and is X.
    """

    def first(theta, carry, inputs, microbatch, step):
        return [body(inputs[0] * theta[0] / 2) * 2], []

    def last(theta, carry, inputs, microbatch, step):
        return [tf.reduce_sum(inputs[0])], []

    weight = tf.constant(2.0)
    stages = [Stage("s0", first, [weight], [], "CPU:0"), Stage("s1", last, [], [], "CPU:1")]
    loss, _, _ = pipeline_loss(
        stages, [tf.constant(X)], schedule or one_f_one_b(2, 4), options=Options(**options)
    )
    return [loss, *tf.gradients(loss, [weight])]


def run_tf2(build):
    return [t.numpy() for t in tf.function(build, autograph=False)()]


def run_tf1(build):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(build())


def asserted(x):
    tf.debugging.Assert(tf.reduce_all(x < 5), ["too large:", x])
    return x


def asserted_in_branch(x):
    return tf.cond(x[0] > 0, lambda: asserted(x), lambda: x)


def checked(x):
    return tf.debugging.check_numerics(tf.where(x > 5, np.inf, x), "too large:") * 0 + x


@pytest.mark.filterwarnings("ignore:.*never used", "ignore:.*Assert. checks or prints in the")
@pytest.mark.parametrize(
    ("run", "body", "options"),
    [
        (run_tf1, asserted, {"compile": True, "loop": True}),
        (run_tf1, asserted_in_branch, {"compile": True}),
        (run_tf1, checked, {"compile": True}),
        (run_tf2, asserted, {"compile": True, "remat": "none"}),
        (run_tf2, checked, {"compile": True, "loop": True}),
        (run_tf1, asserted, {"loop": True}),
        (run_tf1, asserted_in_branch, {}),
        (run_tf1, checked, {"remat": "none"}),
        (run_tf2, asserted, {"check_numerics": "all"}),
        (run_tf2, asserted_in_branch, {"loop": True}),
        (run_tf2, checked, {}),
    ],
)
def test_an_assertion_in_a_stage_fires(run, body, options):
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        run(lambda: loss_of(body, **options))
    loss, grad = run(lambda: loss_of(lambda x: body(x / 10), **options))
    assert [loss, grad] == pytest.approx([5.6, 2.8])


def test_an_assertion_in_a_stage_fires_without_a_gradient():
    def build():
        stage = Stage("s0", lambda t, c, inputs, m, s: ([asserted(inputs[0])], []), [], [], "CPU:0")
        return pipeline([stage], [tf.constant(X)], gpipe(1, 4))[0]

    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        run_tf2(build)


def test_checks_run_once_and_tf1_inlines_every_call():
    def body(x):
        # The gradient is checked as well, by an operation of its own.
        return tf.tanh(tf.debugging.check_numerics(tf.exp(x), "bad"))

    options = tf.compat.v1.RunOptions(output_partition_graphs=True)
    metadata = tf.compat.v1.RunMetadata()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with tf.compat.v1.variable_scope("", use_resource=True):
            x = tf.compat.v1.get_variable("x", initializer=tf.zeros([8]))

        def first(theta, carry, inputs, microbatch, step):
            return [body(inputs[0] * theta[0])], []

        stage = Stage("s0", first, [tf.constant(2.0)], [], "CPU:0")
        (y,), _ = pipeline([stage], [x], gpipe(1, 4), options=Options(remat="full"))
        fetches = [y, *tf.gradients(y, [x])]
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(fetches, options=options, run_metadata=metadata)
    kinds = [node.op for graph in metadata.partition_graphs for node in graph.node]
    assert not [kind for kind in kinds if kind.endswith("PartitionedCall")]
    assert kinds.count("CheckNumerics") == 2 * 4


def dangling(x):
    tf.print("sees", x[0])
    return x


def waited_for(x):
    """A TF1 graph prints what something waits for."""
    with tf.control_dependencies([tf.print("sees", x[0])]):
        return tf.identity(x)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("run", [run_tf1, run_tf2])
def test_a_print_in_a_stage_says_which_microbatch_it_is_of(run, loop, compile, capfd):
    body = waited_for if run is run_tf1 else dangling
    remat = "full" if run is run_tf1 or loop else "none"
    run(lambda: loss_of(body, loop=loop, remat=remat, compile=compile))
    lines = re.findall(r"stage 's0', microbatch (\d): sees (\d)", capfd.readouterr().err)
    assert sorted(lines) == [("0", "0"), ("1", "2"), ("2", "4"), ("3", "6")]


def test_a_print_is_left_as_it_is_if_there_is_one_microbatch(capfd):
    run_tf2(lambda: loss_of(dangling, one_f_one_b(2, 1)))
    assert capfd.readouterr().err.splitlines().count("sees 0") == 1


def scalars(path):
    found = {}
    for file in tf.io.gfile.glob(f"{path}/*"):
        for event in tf.compat.v1.train.summary_iterator(file):
            for value in event.summary.value:
                found[value.tag] = float(tf.make_ndarray(value.tensor))
    return found


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("loop", [False, True])
def test_summaries_of_tf2_are_written_once_a_microbatch(tmp_path, loop, compile):
    writer = tf.summary.create_file_writer(str(tmp_path))

    def body(x):
        tf.summary.scalar("first", x[0])
        return x

    def build():
        with writer.as_default(step=3):
            return loss_of(body, loop=loop, compile=compile)

    run_tf2(build)
    writer.close()
    assert scalars(tmp_path) == {f"stage.s0/first/microbatch_{m}": 2.0 * m for m in range(4)}


@pytest.mark.parametrize("loop", [False, True])
def test_summaries_of_tf1_are_collected_with_those_of_the_graph(loop):
    def body(x):
        tf.compat.v1.summary.scalar("first", x[0], collections=["mine"])
        tf.compat.v1.summary.histogram("all", x)
        return x

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.summary.scalar("outside", 7.0)
        results = loss_of(body, loop=loop)
        assert len(tf.compat.v1.get_collection("mine")) == 1
        merged = tf.compat.v1.summary.merge_all()
        loss, summary = session.run([results[0], merged])
    assert loss == 56
    found = tf.compat.v1.Summary.FromString(summary).value
    values = {v.tag: v.simple_value for v in found if v.HasField("simple_value")}
    assert values.pop("outside") == 7
    assert [v for _, v in sorted(values.items())] == [0, 2, 4, 6]
    assert all(re.fullmatch(r".*first/microbatch_\d", tag) for tag in values)
    assert sum(v.HasField("histo") for v in found) == 4


VARIABLE = tf.Variable(0.0)


def assign(x):
    VARIABLE.assign_add(1.0)
    return x


@tf.function(autograph=False)
def assign_in_function(x):
    return assign(x)


def assign_in_loop(x):
    return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, assign(x)), [0, x])[1]


def python(x):
    return tf.py_function(lambda x: x, [x], tf.float32)


def queue(x):
    tf.queue.FIFOQueue(1, tf.float32, shapes=[[]]).enqueue(x[0])
    return x


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (assign, "AssignAddVariableOp.*accumulators"),
        (assign_in_function, "AssignAddVariableOp"),
        (assign_in_loop, "AssignAddVariableOp"),
        (python, r"EagerPyFunc.*tf\.numpy_function"),
        (queue, "QueueEnqueueV2.*outside"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_whatever_else_has_state_is_named_before_the_first_step(body, message):
    with pytest.raises(PipelineError, match=rf"stage 's0' contains .*{message}"):
        run_tf2(lambda: loss_of(body))
    assert VARIABLE.numpy() == 0
