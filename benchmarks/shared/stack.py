"""The stack of layers that contenders compute: the same weights and inputs for each of them.

Nothing is imported before it is needed, because a contender may have no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Stack:
    """Residual blocks of two dense layers, cut into equal stages.

    Attributes:
        rows: examples in a batch.
        dim: width between blocks.
        hidden: width inside a block.
        blocks: how many blocks there are.
        stages: how many stages they are cut into.
        microbatches: how many parts the batch is cut into.
        features: width of the input; `dim`, or smaller, then a dense layer comes first.
    """

    rows: int
    dim: int
    hidden: int
    blocks: int
    stages: int
    microbatches: int
    features: int | None = None

    def batch_shape(self) -> list[int]:
        """The shape of the input."""
        return [self.rows, self.features or self.dim]

    def batch(self) -> np.ndarray:
        """The input."""
        return np.random.default_rng(0).normal(size=self.batch_shape()).astype(np.float32)

    def layers(self) -> list[Any]:
        """Params of the layers: blocks, after a dense layer where the input is narrow."""
        first = [entrance_params(self.features, self.dim)] if self.features else []
        return first + [block_params(self.dim, self.hidden, i) for i in range(self.blocks)]

    def pipeline(self, gpipe: Any, head: Any = None, **kwargs: Any) -> Any:
        """The stack as a PipeliningLayer of `gpipe`, be it lingvo's module or pipemesh's.

        Args:
            gpipe: the module.
            head: params of a layer after the last block, if any.
            **kwargs: params of the layer.
        """
        layers = self.layers()
        extra = len(layers) - self.blocks
        size = self.blocks // self.stages
        ends = [extra + size * (s + 1) for s in range(self.stages)]
        if head is not None:
            layers.append(head)
            ends[-1] += 1
        cells = [
            gpipe.FeatureExtractionLayer.Params().Set(name=f"stage{s}", sub=layers[begin:end])
            for s, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
        ]
        return gpipe.PipeliningLayer.Params().Set(
            name="stack", cell_tpl=cells, num_micro_batches=self.microbatches, **kwargs
        )


def initial_weight(key: str, shape: Any) -> np.ndarray:
    """The value of a weight, by the names of its layer and itself, as in `block3/w1`."""
    rng = np.random.default_rng(zlib.crc32(f"{key}/var:0".encode()))
    return (0.02 * rng.normal(size=tuple(shape))).astype(np.float32)


def fill(variables: Any, assign: Callable[[Any, np.ndarray], None]) -> None:
    """Assigns every matrix its initial value; biases stay 0."""
    for variable in variables:
        layer, name = variable.name.split("/")[-3:-1]
        if name.startswith("w"):
            assign(variable, initial_weight(f"{layer}/{name}", variable.shape))


def block_params(dim: int, hidden: int, number: int) -> Any:
    """Dense, ReLU, dense, residual: the same lingvo layer for every contender."""
    import tensorflow as tf
    from lingvo.core import base_layer, py_utils

    class Block(base_layer.BaseLayer):
        def _CreateLayerVariables(self):
            super()._CreateLayerVariables()
            init = py_utils.WeightInit.Gaussian(0.02)
            zeros = py_utils.WeightInit.Constant(0.0)
            self.CreateVariable("w1", py_utils.WeightParams([dim, hidden], init))
            self.CreateVariable("b1", py_utils.WeightParams([hidden], zeros))
            self.CreateVariable("w2", py_utils.WeightParams([hidden, dim], init))
            self.CreateVariable("b2", py_utils.WeightParams([dim], zeros))

        def FProp(self, theta, x):
            inner = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, theta.w1), theta.b1))
            return x + tf.nn.bias_add(tf.matmul(inner, theta.w2), theta.b2)

        @classmethod
        def FPropMeta(cls, p, x):
            return py_utils.NestedMap(flops=4 * x[0] * dim * hidden, out_shapes=(x,))

    return Block.Params().Set(name=f"block{number}")


def entrance_params(features: int, dim: int) -> Any:
    """A dense layer from a narrow input to the width of the stack, as embeddings are."""
    import tensorflow as tf
    from lingvo.core import base_layer, py_utils, tshape

    class Entrance(base_layer.BaseLayer):
        def _CreateLayerVariables(self):
            super()._CreateLayerVariables()
            init = py_utils.WeightInit.Gaussian(0.02)
            self.CreateVariable("w", py_utils.WeightParams([features, dim], init))

        def FProp(self, theta, x):
            return tf.matmul(x, theta.w)

        @classmethod
        def FPropMeta(cls, p, x):
            shape = tshape.Shape([x[0], dim])
            return py_utils.NestedMap(flops=2 * x[0] * features * dim, out_shapes=(shape,))

    return Entrance.Params().Set(name="entrance")


def summed_head_params() -> Any:
    """The sum of squares and the number of rows: a head for `loss_inside`."""
    import tensorflow as tf
    from lingvo.core import base_layer

    class SummedHead(base_layer.BaseLayer):
        def FProp(self, theta, y):
            return tf.reduce_sum(y * y), tf.cast(tf.shape(y)[0], tf.float32)

    return SummedHead.Params().Set(name="head")


def row_head_params() -> Any:
    """The sum of squares of every row, for pipelines whose outputs have a batch dim."""
    import tensorflow as tf
    from lingvo.core import base_layer, py_utils, tshape

    class RowHead(base_layer.BaseLayer):
        def FProp(self, theta, y):
            return tf.reduce_sum(y * y, axis=1, keepdims=True)

        @classmethod
        def FPropMeta(cls, p, y):
            shape = tshape.Shape([y[0], 1])
            return py_utils.NestedMap(flops=2 * y[0] * y[1], out_shapes=(shape,))

    return RowHead.Params().Set(name="head")


def sum_of_squares(y: Any) -> Any:
    """The loss of a stack without head."""
    import tensorflow as tf

    return tf.reduce_sum(y * y)


def quiet() -> None:
    """What every process that uses lingvo does first: it can be imported then, and is silent."""
    from absl import flags, logging

    from pipemesh.layers import lingvo_loader as _  # noqa: F401

    logging.set_verbosity(logging.ERROR)
    flags.FLAGS.mark_as_parsed()


def set_threads(inter_op: int, intra_op: int, num_devices: int) -> None:
    """Logical devices and threads of this process."""
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * num_devices,
    )
    tf.config.threading.set_inter_op_parallelism_threads(inter_op)
    tf.config.threading.set_intra_op_parallelism_threads(intra_op)


def tf2_step(
    make_params: Callable[[], Any],
    stack: Stack,
    num_devices: int,
    loss_of: Callable[[Any], Any],
    device_type: str = "CPU",
) -> Callable[[], tuple[float, float]]:
    """A compiled step of a layer in lingvo's eager mode.

    Args:
        make_params: gives the params of the layer.
        stack: for its input.
        num_devices: how many devices its mesh has.
        loss_of: the loss, of the layer's output.
        device_type: `CPU` or `GPU`.

    Returns:
        A function that runs a step with all gradients and returns the loss and the norm of the
        gradient of the first layer's first variable.
    """
    import tensorflow as tf
    from lingvo.core import py_utils

    from pipemesh.layers import mesh_cluster
    from pipemesh.mesh import Mesh

    mesh = Mesh((("layers", num_devices),))
    py_utils.SetEagerMode(True)
    with mesh_cluster(mesh, device_type=device_type):
        py_utils.GetOrCreateGlobalStepVar()
        layer = make_params().Instantiate()
    variables = layer.vars.Flatten()
    fill(variables, lambda variable, value: variable.assign(value))
    x = tf.constant(stack.batch())

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(layer.FPropDefaultTheta(x))
        return loss, tape.gradient(loss, variables)

    def run():
        with mesh_cluster(mesh, device_type=device_type):
            loss, grads = step()
            return float(loss), float(tf.linalg.global_norm(grads[:1]))

    return run


def started_session(num_devices: int, inter_op: int) -> Any:
    """A TF1 session of the current graph, its variables initialized, one intra-op thread.

    Args:
        num_devices: number of CPU devices.
        inter_op: number of inter-op threads.
    """
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(
        device_count={"CPU": num_devices},
        inter_op_parallelism_threads=inter_op,
        intra_op_parallelism_threads=1,
    )
    session = tf.compat.v1.Session(config=config)
    session.run(tf.compat.v1.global_variables_initializer())
    return session


def lingvo_step(
    stack: Stack,
    inter_op: int,
    head: Any = None,
    loss_of: Callable[[Any], Any] = sum_of_squares,
    computes: bool = True,
) -> Callable[[], tuple[float, float]]:
    """The same by lingvo's own PipeliningLayer, in a TF1 session, one intra-op thread.

    Args:
        stack: the stack.
        inter_op: number of inter-op threads.
        head: params of a layer after the last block, if any.
        loss_of: the loss, of the layer's output.
        computes: if not, there are only variables, and a step gives zeros.
    """
    import tensorflow as tf
    from lingvo.core import cluster_factory, gpipe, py_utils

    cluster = cluster_factory.ForTestingWorker(
        mode="sync", job="trainer_client", cpus=stack.stages, split_size=stack.stages
    )
    with tf.Graph().as_default(), cluster:
        py_utils.GetOrCreateGlobalStepVar()
        layer = stack.pipeline(gpipe, head).Instantiate()
        variables = layer.vars.Flatten()
        fetches = [tf.zeros([]), tf.zeros([])]
        if computes:
            loss = loss_of(layer.FPropDefaultTheta(tf.constant(stack.batch())))
            grads = tf.compat.v1.gradients(loss, variables, colocate_gradients_with_ops=True)
            fetches = [loss, tf.linalg.global_norm(grads[:1]), [grad.op for grad in grads]]
        session = started_session(stack.stages, inter_op)
        fill(variables, lambda variable, value: variable.load(value, session))
    return lambda: tuple(float(v) for v in session.run(fetches)[:2])
