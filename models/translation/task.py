"""The lingvo task: a pipelined encoder-decoder that predicts the next token of the target."""

from __future__ import annotations

import tensorflow as tf

from ..one_billion_word.task import LanguageModel


class Translation(LanguageModel):
    """A task whose loss is the mean cross entropy of the target's labels, given the source.

    Layers of its stack are those of `pipemesh.layers.named.encoder_decoder_layers`.
    """

    # Of the source, [batch, source length] int32, and of the target.
    INPUTS = ("source_ids", "source_segment_ids", "source_segment_pos", *LanguageModel.INPUTS)

    def DecodeArgs(self, ids, places, source=None):
        """Returns arguments of `stack` that predict what follows tokens of the target.

        `ids` and `places` are as in `LanguageModel`. `source`, [batch, source length] int32, is -1
        behind the source's end; None if the cache has what the decoder needs of it.
        """
        target = super().DecodeArgs(ids, places)
        if source is None:
            return None, None, None, *target
        batch, length = source.shape
        segments = tf.cast(source >= 0, tf.int32)
        positions = tf.tile(tf.range(length)[None], [batch, 1])
        return tf.maximum(source, 0), segments, positions, *target
