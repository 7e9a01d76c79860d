"""What the last stage may return for one microbatch."""

import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.layers.pipeline.head import check_head


def check(function, loss_inside, names=None):
    """Checks what a function of a vector returns, in a graph, where heads are traced."""
    with tf.Graph().as_default():
        outputs = [tf.convert_to_tensor(t) for t in function(tf.ones([4]))]
        names = names or [f"outputs.{i}" for i in range(len(outputs))]
        check_head("the head", names, outputs, loss_inside)


def test_without_a_loss_inside_every_output_has_a_dim():
    check(lambda x: (x, tf.ones([1])), False)
    with pytest.raises(PipelineError, match=r"^the head returns a scalar \(outputs\.1\)"):
        check(lambda x: (x, tf.reduce_sum(x)), False)


def summed(x):
    return tf.reduce_sum(x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (summed(x), 4.0),
        lambda x: (summed(x), 4),
        lambda x: (summed(x), summed(tf.abs(x)), x, summed(x)),
        lambda x: (tf.cast(summed(x), tf.float16), 4),
        # A mean whose weight is one, and one of a single element.
        lambda x: (tf.reduce_mean(x), 1.0),
        lambda x: (tf.reduce_mean(x), 1),
        lambda x: (tf.reduce_mean(x[:1]), 4.0),
        # Divided by something else than the weight.
        lambda x: (summed(x) / summed(x * x), summed(tf.abs(x))),
    ],
)
def test_a_summed_loss_with_its_weight_is_right(function):
    check(function, True)


def _divided(x, divide, disguise):
    weight = summed(tf.abs(x))
    return disguise(divide(summed(x), disguise(weight))), weight


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (summed(x),), "outputs.0: float32 of shape .*, and no weight after it"),
        (lambda x: (x, 4.0), "outputs.0 is no loss"),
        (lambda x: (tf.size(x), 4.0), "outputs.0 is no loss"),
        (lambda x: (summed(x), x), "outputs.1 is no weight"),
        (lambda x: (summed(x), True), "outputs.1 is no weight"),
        (lambda x: (tf.reduce_mean(x), 4.0), r"the loss \(outputs.0\) is a mean, Mean"),
        (lambda x: (tf.cast(tf.reduce_mean(x), tf.float64), 4.0), "is a mean, Mean"),
        (lambda x: _divided(x, tf.divide, tf.identity), "is a mean, RealDiv"),
        (
            lambda x: _divided(x, tf.math.divide_no_nan, lambda t: tf.ensure_shape(t, [])),
            "is a mean, DivNoNan",
        ),
    ],
)
def test_anything_else_is_an_error_that_says_what_to_return(function, message):
    with pytest.raises(PipelineError, match=rf"^the head.*{message}.*return tf\.reduce_sum"):
        check(function, True)


def test_what_is_nested_is_no_loss():
    with pytest.raises(PipelineError, match="and no weight after it"):
        check(lambda x: (summed(x), 4.0), True, names=["outputs.0.loss", "outputs.0.weight"])
