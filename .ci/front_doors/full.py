"""What the wheel with TensorFlow is for: a stack that is declared in params."""

import numpy as np
import tensorflow as tf

# Before lingvo: makes it load on systems older than glibc 2.38.
from pipemesh.layers import PartitionSequentialLayers, PipeliningLayer  # isort: skip
from lingvo.core import layers, tshape

dense = layers.FCLayer.Params().Set(input_dim=4, output_dim=4)
params = PipeliningLayer.Params().Set(
    name="stack",
    cell_tpl=PartitionSequentialLayers([dense] * 4, 2, tshape.Shape([8, 4])),
    num_micro_batches=4,
)
given = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
with tf.Graph().as_default():
    stack = params.Instantiate()
    outputs = stack.FPropDefaultTheta(tf.constant(given))
    grads = tf.gradients(tf.reduce_sum(outputs), stack.vars.Flatten())
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        got, got_grads, values = session.run([outputs, grads, stack.vars.Flatten()])
    names = [variable.name.removesuffix("/var:0") for variable in stack.vars.Flatten()]

weights = {name: tf.constant(value) for name, value in zip(names, values, strict=True)}
with tf.GradientTape() as tape:
    tape.watch(weights)
    wanted = tf.constant(given)
    for layer in range(4):
        w, b = (weights[f"cell_{layer:03}/{name}"] for name in "wb")
        wanted = tf.nn.relu(wanted @ w + b)
    total = tf.reduce_sum(wanted)
wanted_grads = tape.gradient(total, weights)
np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
for name, grad in zip(names, got_grads, strict=True):
    np.testing.assert_allclose(grad, wanted_grads[name], rtol=1e-5, atol=1e-6, err_msg=name)
print("with TensorFlow: a pipeline of two stages, outputs and gradients those of the plain stack")
