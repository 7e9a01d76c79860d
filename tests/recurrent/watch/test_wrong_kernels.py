"""A stage whose products this machine computes wrongly does not train."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent import Options, Stage, pipeline_loss
from pipemesh.recurrent.watch import wrong_kernels
from pipemesh.recurrent.watch.wrong_kernels import einsum_error
from pipemesh.schedule import one_f_one_b

WEIGHT = np.random.default_rng(0).normal(size=[4, 4]).astype(np.float32)


def train(product, dtype=tf.float16):
    def forward(theta, carry, inputs, microbatch, step):
        return [tf.reduce_sum(product(inputs[0], theta[0]))], []

    @tf.function(autograph=False)
    def step():
        stages = [Stage("s0", forward, [tf.constant(WEIGHT)], [], "CPU:0")]
        return pipeline_loss(
            stages, [tf.ones([4, 3, 4])], one_f_one_b(1, 2), options=Options(compute_dtype=dtype)
        )[0]

    return step()


def spelt(x, w):
    return tf.einsum("abi,ij->abj", x, w)


def ellipsis(x, w):
    return tf.einsum("...i,ij->...j", x, w)


def in_a_branch(x, w):
    return tf.cond(tf.reduce_all(tf.math.is_finite(x)), lambda: ellipsis(x, w), lambda: x)


@pytest.mark.parametrize("product", [ellipsis, in_a_branch])
def test_an_einsum_that_this_cpu_gets_wrong_is_refused(monkeypatch, product):
    monkeypatch.setattr(wrong_kernels, "einsum_error", lambda _: 1.38)
    with pytest.raises(PipelineError, match=r"an einsum '.*spell the dims.*ONEDNN"):
        train(product)
    train(spelt)
    train(product, tf.bfloat16)


@pytest.mark.parametrize("equation", ["...i,ij->...j", "...j,ij...->...i", "...ij,...jk->...ik"])
def test_what_is_tried_is_what_the_kernel_does(equation):
    if equation == "...i,ij->...j":
        x = np.random.default_rng(1).normal(size=[2, 3, 4]).astype(np.float16)
        found = tf.einsum(equation, x, WEIGHT.astype(np.float16))
        off = np.abs(np.einsum(equation, x.astype(np.float64), WEIGHT) - found).max()
        assert (off > 0.1) == (einsum_error(equation) > 0.1)
    else:
        assert einsum_error(equation) >= 0


def test_a_trained_stage_with_an_ellipsis_is_right_or_refused():
    wanted = float(train(spelt))
    try:
        assert float(train(ellipsis)) == pytest.approx(wanted, rel=1e-2)
    except PipelineError as error:
        assert "einsum" in str(error)
