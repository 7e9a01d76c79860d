"""No position sees the future or another sentence, and flops are counted right."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils, tshape

from models.one_billion_word.transformer import Block, Embedding, Softmax, sinusoids
from pipemesh.plan import Plan
from tests.layers.harness import cluster
from tests.models.one_billion_word.language_model import BATCH_SIZE, TIME, random_batch, small


@contextlib.contextmanager
def eager_mode(do_eval):
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        with cluster(2, do_eval):
            py_utils.GetOrCreateGlobalStepVar().assign(3)
            yield
    finally:
        py_utils.SetEagerMode(False, test_mode=True)


@pytest.fixture(scope="module", params=["dropout on", "dropout off"])
def losses(request):
    """The nats of every token [batch, time], computed in two stages on two devices."""
    with eager_mode(do_eval=request.param == "dropout off"):
        task = small(PLAN=Plan("layers:2", num_microbatches=4)).Task().Instantiate()

        @tf.function(autograph=False)
        def xent(batch):
            return task.ComputePredictions(task.theta, py_utils.NestedMap(batch)).xent

        yield lambda batch: xent({k: tf.constant(v) for k, v in batch.items()}).numpy()


def changed(batch, where):
    """The batch with other tokens read at `where`, bool [batch, time]."""
    ids = np.where(where, (batch["ids"] + 7) % 40, batch["ids"])
    return {**batch, "ids": ids.astype(np.int32)}


@pytest.mark.slow
def test_a_sentence_leaves_its_neighbours_in_the_pack_bit_identical(losses):
    batch = random_batch()
    before = losses(batch)
    for segment in (1, 2, 4):
        mine = batch["segment_ids"] == segment
        after = losses(changed(batch, mine))
        np.testing.assert_array_equal(after[~mine], before[~mine])
        assert (after[mine] != before[mine]).all()


def test_no_token_sees_what_comes_after_it(losses):
    batch = {**random_batch(), "segment_ids": np.ones([BATCH_SIZE, TIME], np.int32)}
    before = losses(batch)
    for first in (1, 7, TIME - 1):
        later = np.broadcast_to(np.arange(TIME) >= first, [BATCH_SIZE, TIME])
        after = losses(changed(batch, later))
        np.testing.assert_array_equal(after[~later], before[~later])
        assert (after[later] != before[later]).all()


def test_a_row_leaves_the_other_rows_alone(losses):
    batch = random_batch()
    before = losses(batch)
    row = np.broadcast_to(np.arange(BATCH_SIZE)[:, None] == 5, [BATCH_SIZE, TIME])
    np.testing.assert_array_equal(losses(changed(batch, row))[~row], before[~row])


def test_sinusoids_restart_with_the_segment():
    positions = np.array([[0, 1, 2, 0, 1, 0]], np.int32)
    encoded = sinusoids(tf.constant(positions), 8).numpy()[0]
    np.testing.assert_array_equal(encoded[0], [0, 0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(encoded[3], encoded[0])
    np.testing.assert_array_equal(encoded[4], encoded[1])
    np.testing.assert_allclose(encoded[2][0], np.sin(2), rtol=1e-6)
    np.testing.assert_allclose(encoded[2][3], np.sin(2e-4), rtol=1e-5)
    np.testing.assert_allclose(encoded[2][7], np.cos(2e-4), rtol=1e-6)


def test_the_embedding_adds_positions_of_the_segment():
    p = Embedding.Params().Set(name="embedding", vocab_size=5, model_dim=8)
    with eager_mode(do_eval=True):
        layer = p.Instantiate()
        ids = tf.constant([[3, 3, 3, 3]])
        rest = [tf.zeros([1, 4])] * 3
        hidden, *_ = layer.FPropDefaultTheta(ids, *rest, tf.constant([[0, 1, 0, 1]]))
    hidden = hidden.numpy()[0]
    np.testing.assert_array_equal(hidden[:2], hidden[2:])
    assert (hidden[0] != hidden[1]).any()


# Batch, time, model, hidden and vocabulary sizes.
B, T, D, H, V = 2, 5, 8, 12, 30


@pytest.mark.parametrize(
    ("params", "flops"),
    [
        # Scale, position, sum and dropout of each number.
        (Embedding.Params().Set(vocab_size=V, model_dim=D), 4 * B * T * D),
        (
            Block.Params().Set(model_dim=D, hidden_dim=H, num_heads=2),
            # A multiplication and an addition in each cell of: query, key, value and output
            # projection; logits and their weighted sum; and the two feed-forward projections.
            2 * (4 * B * T * D * D + 2 * B * T * T * D + 2 * B * T * D * H),
        ),
        # The projection, and five operations a logit for bias and cross entropy.
        (Softmax.Params().Set(vocab_size=V, model_dim=D), 2 * B * T * D * V + 5 * B * T * V),
    ],
)
def test_flops_equal_a_count_by_hand(params, flops):
    ids = tshape.Shape([B, T])
    first = ids if params.cls is Embedding else tshape.Shape([B, T, D])
    meta = params.cls.FPropMeta(params, first, ids, ids, ids, ids)
    assert meta.flops == flops
    shapes = [shape.ToTensorShape().as_list() for shape in meta.out_shapes]
    if params.cls is Softmax:
        assert shapes == [[], [], [B, T]]
    else:
        assert shapes == [[B, T, D], [B, T], [B, T], [B, T], [B, T]]
