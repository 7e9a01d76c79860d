"""A step of lingvo's own pipelined language model, of the size of OneBillionWordTiny."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from shared.stack import quiet, started_session

STAGES, INTER_OP = 2, 4


def lingvo_step(num_microbatches: int, dropout: float) -> Callable[[], tuple[float]]:
    """Trains `GPipeTransformerLm` of lingvo on one batch, in a TF1 session, in two stages.

    Args:
        num_microbatches: how many microbatches it cuts the batch into.
        dropout: the probability.
    """
    quiet()
    import numpy as np
    import tensorflow as tf
    from lingvo.core import cluster_factory, optimizer, py_utils
    from lingvo.tasks.lm import layers as lm_layers

    from models.one_billion_word.sizes import Tiny

    cluster = cluster_factory.ForTestingWorker(
        mode="sync", job="trainer_client", cpus=STAGES, split_size=STAGES
    )
    with tf.Graph().as_default(), cluster:
        py_utils.GetOrCreateGlobalStepVar()
        params = lm_layers.GPipeTransformerLm.CommonParams(
            vocab_size=Tiny.VOCAB_SIZE,
            model_dim=Tiny.MODEL_DIM,
            hidden_dim=Tiny.HIDDEN_DIM,
            num_heads=Tiny.NUM_HEADS,
            num_layers=Tiny.NUM_LAYERS,
            splits=STAGES,
            num_micro_batches=num_microbatches,
            num_shards=1,
            input_dropout_prob=dropout,
            residual_dropout_prob=dropout,
            atten_dropout_prob=dropout,
            relu_dropout_prob=dropout,
        )
        layer = params.Instantiate()
        shape = [Tiny.BATCH_SIZE, Tiny.SEQUENCE_LENGTH]
        tokens = np.random.default_rng(0).integers(Tiny.VOCAB_SIZE, size=[2, *shape])
        ids, labels = (tf.constant(part, tf.int32) for part in tokens)
        weights = tf.ones(shape)
        found, _ = layer.FPropDefaultTheta(
            ids, tf.zeros(shape), labels=py_utils.NestedMap(class_ids=labels, class_weights=weights)
        )
        variables = layer.vars.Flatten()
        grads = tf.compat.v1.gradients(found.avg_xent, variables, colocate_gradients_with_ops=True)
        adam = optimizer.Adam.ParamsB().Set(name="adam").Instantiate().GetOptimizer(1e-3)
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        train = adam.apply_gradients(pairs)
        session = started_session(STAGES, INTER_OP)
    return lambda: (float(session.run([found.avg_xent, train])[0]),)
