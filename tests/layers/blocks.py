"""Small layers for tests."""

import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils

WIDTH = 4


class Counter(base_layer.Accumulator):
    def DefaultValue(self):
        return tf.constant(0.0)


class Weighted(base_layer.BaseLayer):
    """Has a weight `w`."""

    shape = (WIDTH, WIDTH)
    init = py_utils.WeightInit.Gaussian(0.3)

    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        self.CreateVariable("w", py_utils.WeightParams([*self.shape], self.init))


class Block(Weighted):
    """Dense, dropout of three kinds, and a count of the examples seen."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("rate", 0.3, "Dropout rate.")
        p.Define("time_major", False, "Whether the batch is the second dim.")
        return p

    def __init__(self, params):
        super().__init__(params)
        p = self.params
        keyed = layers.DeterministicDropoutLayer.Params()
        stateful = layers.DropoutLayer.Params()
        self.CreateChild("keyed", keyed.Set(keep_prob=1 - p.rate))
        self.CreateChild("stateful", stateful.Set(keep_prob=1 - p.rate))
        self.RegisterAccumulator("seen", Counter())

    def FProp(self, theta, x, *rest):
        p = self.params
        h = tf.nn.tanh(tf.tensordot(x, theta.w, 1))
        h = self.keyed.FProp(theta.keyed, h)
        h = self.stateful.FProp(theta.stateful, h)
        if not self.do_eval:
            h += 0.1 * tf.random.normal(h.shape, dtype=h.dtype)
        seen = self.accumulators.seen
        seen.SetValue(seen.GetValue() + float(x.shape[1 if p.time_major else 0]))
        return (x + h, *rest) if rest else x + h

    @classmethod
    def FPropMeta(cls, p, x, *rest):
        return py_utils.NestedMap(flops=x.num_elements() * 2 * WIDTH, out_shapes=(x, *rest))


def blocks(number, **kwargs):
    return [Block.Params().Set(name=f"block{i}", **kwargs) for i in range(number)]
