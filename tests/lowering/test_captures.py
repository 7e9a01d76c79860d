"""What a layer function may use from outside of its loop."""

import contextlib

import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.lowering.captures import check_layer_function
from pipemesh.lowering.placement import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh

LOWERING = PlacementLowering(
    Mesh.from_text("layers:2;data:2"), LayoutRules(), [f"CPU:{i}" for i in range(4)]
)


def use(make):
    """Uses in the body of a loop what `make` made outside of it."""

    @tf.function(autograph=False)
    def run(x):
        outside = make(x)

        def body(i):
            with check_layer_function(LOWERING):
                return i + tf.cast(tf.reduce_sum(outside), tf.int32)

        return tf.while_loop(lambda i: i < 9, body, [tf.constant(0)])

    return run(tf.ones([3]))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: tf.constant([1.0, 2.0]),
        tf.stop_gradient,
        lambda x: tf.identity(tf.stop_gradient(x * 2)),
        lambda x: tf.cast(x, tf.int32),
    ],
)
def test_what_has_no_gradient_may_be_used(make):
    assert use(make)[0] >= 9


@pytest.mark.parametrize("make", [lambda x: x, lambda x: tf.identity(x) * 2.0])
def test_what_would_lose_its_gradient_is_an_error(make):
    with pytest.raises(PipelineError, match=r"pass it among the weights, or through tf\.stop"):
        use(make)


@pytest.mark.parametrize(("axis", "fails"), [("data", False), ("layers", True)])
def test_communication_along_the_layers_is_an_error(axis, fails):
    error = pytest.raises(PipelineError, match="every stage works on another microbatch")
    with error if fails else contextlib.nullcontext(), check_layer_function(LOWERING):
        LOWERING.all_reduce(tuple(tf.ones([2]) for _ in range(4)), [axis])
