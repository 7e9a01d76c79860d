"""The lingvo task: a pipelined stack of layers that predicts the next token."""

from __future__ import annotations

import tensorflow as tf
from lingvo.core import base_model, py_utils

from pipemesh.layers import PipeliningLayer


class LanguageModel(base_model.BaseTask):
    """A task whose loss is the mean cross entropy of the labels, computed by the last stage of
    `stack`.
    """

    # The inputs of the stack, in order.
    INPUTS = ("ids", "labels", "weights", "segment_ids", "segment_pos")
    # Its results, in order.
    OUTPUTS = ("loss", "num_tokens", "xent")

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("stack", PipeliningLayer.Params(), "From ids to the cross entropy of labels.")
        return p

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("stack", self.params.stack)

    def ComputePredictions(self, theta, input_batch):
        """Returns the loss, summed by the last stage.

        The input has what `INPUTS` names, each [batch, time], `weights` float32 and the rest
        int32. The result has the summed `loss` in nats and `num_tokens`, both float32 scalars, and
        `xent` [batch, time] float32, without gradient.
        """
        inputs = [input_batch[name] for name in self.INPUTS]
        outputs = self.stack.FProp(theta.stack, *inputs)
        return py_utils.NestedMap(zip(self.OUTPUTS, outputs, strict=False))

    def ComputeLoss(self, theta, predictions, input_batch):
        """Returns the metrics `loss` (nats per token) and `num_tokens`, and of every example
        `xent`, `labels` and `weights`.
        """
        del theta
        num_tokens = predictions.num_tokens
        loss = tf.math.divide_no_nan(predictions.loss, num_tokens)
        metrics = py_utils.NestedMap(
            loss=(loss, num_tokens), num_tokens=(num_tokens, tf.constant(1.0))
        )
        per_example = {name: input_batch[name] for name in ("labels", "weights")}
        return metrics, py_utils.NestedMap(per_example, xent=predictions.xent)

    def DecodeArgs(self, ids, places):
        """Returns arguments of `stack` that predict what follows tokens.

        `ids` and `places`, the positions in their rows, are [batch, time] int32.
        """
        nothing = tf.zeros_like(ids)
        # Each row is one segment. There are no labels, so weights are 0.
        return ids, nothing, tf.cast(nothing, tf.float32), tf.ones_like(ids), places

    def Inference(self):
        """Returns the graph for `lingvo.trainer --mode=write_inference_graph`, which scores packed
        rows.

        Feeds and fetches are those of `ComputePredictions`, for any number of rows; `xent` is minus
        the log probability of every label.
        """
        shape = [None, self.params.input.sequence_length if self.params.input else None]
        with tf.name_scope("inference"):
            feeds = py_utils.NestedMap(
                {
                    name: tf.compat.v1.placeholder(
                        tf.float32 if name == "weights" else tf.int32, shape, name
                    )
                    for name in self.INPUTS
                }
            )
            return {"default": (self._by_row(feeds), feeds)}

    def _by_row(self, batch):
        """Returns the result of `ComputePredictions` for any number of rows, computed row by row.

        Layers with named dims must know all sizes before they run.
        """

        def of_row(row):
            found = self.ComputePredictions(
                self.theta, py_utils.NestedMap(row).Transform(lambda t: t[None])
            )
            return found.loss, found.num_tokens, found.xent[0]

        signature = (tf.float32, tf.float32, tf.float32)
        loss, num_tokens, xent = tf.map_fn(of_row, dict(batch), fn_output_signature=signature)
        return py_utils.NestedMap(
            loss=tf.reduce_sum(loss), num_tokens=tf.reduce_sum(num_tokens), xent=xent
        )

    def Decode(self, input_batch):
        """Refuses: lingvo's decoders read held-out data, which has no prompts."""
        raise NotImplementedError(
            "LanguageModel is no decoder job of lingvo's; `pipemesh decode --logdir=RUN "
            "--prompt=TEXT` continues texts, --job=evaler_heldout gives the loss, and "
            "--mode=write_inference_graph a graph that scores text"
        )
