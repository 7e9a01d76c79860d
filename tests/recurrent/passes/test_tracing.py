"""State left behind by Python's calls of a stage, and a replica's part of a traced graph."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.randomness import layer_scope
from pipemesh.recurrent import Home, Stage, pipeline
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.tracing import trace, whole_draws
from pipemesh.schedule import gpipe
from tests.recurrent.passes.traced import WEIGHTS, WIDTH, run, traced_stage

DEVICES = ("CPU:1", "CPU:2")
X = tf.TensorSpec([2, 3])


def stage_of(forward, devices=DEVICES, theta=(2.0,)):
    return Stage("s", forward, [*map(tf.constant, theta)], [tf.constant(0)], devices)


def test_an_output_has_a_name_of_its_own():
    def twice(theta, carry, inputs, microbatch, step):
        return [inputs[0], inputs[0]], carry

    with tf.Graph().as_default():
        (replica,) = trace(stage_of(twice), [X], False).replicas
    names = [t.name for t in [*replica.inputs, *replica.outputs, *replica.carry_out]]
    assert len({*names, replica.carry[0].name}) == 5


def test_replicas_that_do_not_return_alike_are_an_error():
    calls = []

    def forward(theta, carry, inputs, microbatch, step):
        calls.append(None)
        return [inputs[0]] * len(calls), carry

    text = (
        r"stage 's' has replicas.* gives float32\(2, 3\), int32\(\) in replica 0, but "
        r"float32\(2, 3\), float32\(2, 3\), int32\(\) in replica 1"
    )
    with tf.Graph().as_default(), pytest.raises(PipelineError, match=text):
        trace(stage_of(forward), [X], False, 2)


def test_the_whole_batch_is_traced_only_as_far_as_needed():
    calls = []

    def drops(name):
        def forward(theta, carry, inputs, microbatch, step):
            calls.append((name, inputs[0].shape.as_list()))
            with layer_scope(name):
                return [tf.nn.dropout(inputs[0], 0.5)[:, :2]], carry

        return forward

    with tf.Graph().as_default():
        stages = [stage_of(drops(name), "CPU:0") for name in "abc"]
        whole = whole_draws(stages, [tf.TensorSpec([8, 3])], True, Cutting(4, 2, 0))
        assert calls == []
        one, two = next(whole), next(whole)
        assert calls == [("a", [8, 3]), ("b", [8, 2])]
        assert [draw.sizes for draw in one.by_name.values()] == [(8, 3)]
        assert [draw.sizes for draw in two.by_name.values()] == [(8, 2)]


PAIR = np.float32([1.0, 2.0])


def test_looked_up_rows_of_an_input_have_a_dense_one():
    def forward(theta, carry, inputs, microbatch, step):
        return [tf.gather(inputs[0], [1])], carry

    with tf.Graph().as_default():
        stage = traced_stage(forward, theta=(), inputs=(PAIR,))
        of_outputs = stage.gradients.of_outputs
        given = {stage.inputs[0]: tf.constant(PAIR), of_outputs[0]: tf.constant([4.0])}
        of_input = run(stage.cut.paste(given, stage.gradients.of_inputs))
    np.testing.assert_array_equal(of_input, [[0.0, 4.0]])


def test_in_a_function_of_tf2_nobody_collects_summaries():
    def forward(theta, carry, inputs, microbatch, step):
        tf.raw_ops.ScalarSummary(tags="s", values=1.0)
        return [inputs[0]], carry

    found = []

    @tf.function(autograph=False)
    def outer():
        found.append(traced_stage(forward).summaries)

    outer.get_concrete_function()
    with tf.Graph().as_default():
        found.append(traced_stage(forward).summaries)
    assert [summaries is None for summaries in found] == [True, False]


HOME = Home(("CPU:1", "CPU:2"))
W = WEIGHTS[0]
ROWS = np.random.default_rng(1).normal(size=[8, WIDTH]).astype(np.float32)


class Keeps:
    """A stage that keeps a tensor in Python from one call to the next."""

    def __init__(self, of):
        self.of = of
        self.kept = None

    def __call__(self, theta, carry, inputs, microbatch, step):
        h = tf.matmul(inputs[0], theta[0])
        if self.kept is None:
            self.kept = self.of(theta, carry, inputs, microbatch)
        return [h + tf.cast(self.kept, tf.float32)], [carry[0] + 1.0]


def with_kept(of):
    @tf.function(autograph=False)
    def run():
        stage = Stage("keeps", Keeps(of), [tf.constant(W)], [tf.constant(0.0)], HOME)
        return pipeline([stage], [tf.constant(ROWS)], gpipe(1, 2))[0][0]

    return run


@pytest.mark.parametrize(
    "of",
    [
        lambda theta, carry, inputs, microbatch: inputs[0],
        lambda theta, carry, inputs, microbatch: tf.reduce_sum(tf.square(inputs[0])),
        lambda theta, carry, inputs, microbatch: tf.cast(theta[0], tf.float16)[0],
        lambda theta, carry, inputs, microbatch: carry[0],
        lambda theta, carry, inputs, microbatch: tf.cast(microbatch, tf.float32),
        lambda theta, carry, inputs, microbatch: tf.cond(
            carry[0] > 0, lambda: inputs[0], lambda: -inputs[0]
        ),
    ],
    ids=["input", "computed", "weight", "carry", "microbatch", "branch"],
)
def test_a_replica_that_uses_a_tensor_of_another_one_is_an_error(of):
    text = (
        r"stage 'keeps' has replicas, and its operation '.*replica\.1.*' \(\w+\) of replica 1 use"
    )
    with pytest.raises(PipelineError, match=text):
        with_kept(of)()


def test_what_is_the_same_for_all_replicas_may_be_kept():
    y = with_kept(lambda theta, carry, inputs, microbatch: tf.ones([WIDTH]) * 2)()
    np.testing.assert_allclose(y, ROWS @ W + 2, rtol=1e-4)


def test_a_gradient_with_another_replicas_tensor_is_an_error():
    kept = []

    @tf.custom_gradient
    def squared(x):
        kept[:] = [x]
        return x * x, lambda dy: 2 * dy * kept[0]

    def forward(theta, carry, inputs, microbatch, step):
        return [squared(tf.matmul(inputs[0], theta[0]))], carry

    text = r"stage 's' .*gradients.*\(Mul\) of replica 0 uses .*, which replica 1 has computed"
    with tf.Graph().as_default(), pytest.raises(PipelineError, match=text):
        traced_stage(forward, replicas=2)


def test_a_single_replica_may_keep_what_it_likes():
    keeps = Keeps(lambda theta, carry, inputs, microbatch: inputs[0])
    with tf.Graph().as_default():
        traced_stage(keeps, carry=(0.0,))
