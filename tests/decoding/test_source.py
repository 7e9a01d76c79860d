"""A model that reads a source decodes it once, and says the same under every plan."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from models.translation.task import Translation
from pipemesh.decoding import BeamSearch, Sampler, SourcePrompt
from pipemesh.errors import DecodingError
from pipemesh.layers import PipeliningLayer, partition_layers
from pipemesh.layers.named import (
    Embedding,
    SoftmaxCrossEntropy,
    TransformerBlock,
    encoder_decoder_layers,
)
from pipemesh.partition import Partition
from pipemesh.plan import Plan
from pipemesh.training.trained_task import TrainedTask
from tests.decoding.models import decoder, in_order

VOCAB, LENGTH, SOURCE, MOST = 19, 12, 7, 5
PLAIN = Plan("layers:1", num_microbatches=1)


def trained(plan=PLAIN, bounds=(0, 6)):
    block = TransformerBlock.Params().Set(input_dim=8, num_heads=2, hidden_dim=16)
    block.attention_tpl.Set(relative_buckets=4, relative_max_distance=5)
    layers, tied = encoder_decoder_layers(
        Embedding.Params().Set(vocab_size=VOCAB, positions="sinusoidal"),
        block,
        SoftmaxCrossEntropy.Params().Set(vocab_size=VOCAB),
        num_encoder_layers=1,
        num_decoder_layers=2,
    )
    stages = partition_layers.stage_params(
        partition_layers.named_layers(layers), Partition(bounds, (1.0,) * (len(bounds) - 1))
    )
    p = Translation.Params().Set(name="translation", random_seed=1)
    p.stack = PipeliningLayer.ForPlan(plan, cell_tpl=stages, tied_weights=tied, loss_inside=True)
    return TrainedTask(p, plan, "CPU", 0, learns=False)


def prompts_of(*lengths):
    rng = np.random.default_rng(2)
    return [SourcePrompt(rng.integers(0, VOCAB, n).tolist(), [1, 2][: 1 + n % 2]) for n in lengths]


PROMPTS = prompts_of(3, 7, 1, 5, 2)


def decoded(task, chooser=None, prompts=PROMPTS, stop=(), **sizes):
    sizes |= {"length": LENGTH, "vocab_size": VOCAB, "source_length": SOURCE}
    return in_order(decoder(task, chooser=chooser, stop=stop, **sizes).generate(prompts, MOST))


def by_loss(task, prompt):
    """Greedy tokens, and the logarithms of their probabilities, from the loss that training has,
    without a cache."""
    row = list(prompt.ids)

    @tf.function(autograph=False)
    def losses(ids, labels):
        ones = tf.ones_like(ids)
        source = tf.tile([prompt.source], [VOCAB, 1])
        places = tf.tile([tf.range(len(prompt.source))], [VOCAB, 1])
        with task.cluster(do_eval=True), py_utils.GlobalStepContext(task.step):
            inputs = source, tf.ones_like(source), places, ids, labels, tf.cast(ones, tf.float32)
            targets = ones, tf.tile([tf.range(LENGTH)], [VOCAB, 1])
            return task.task.stack.FProp(task.task.theta.stack, *inputs, *targets)[2]

    logs = []
    for _ in range(MOST):
        ids, labels = (np.zeros([VOCAB, LENGTH], np.int32) for _ in range(2))
        ids[:, : len(row)] = row
        labels[:, len(row) - 1] = range(VOCAB)
        found = losses(ids, labels).numpy()[:, len(row) - 1]
        row.append(int(np.argmin(found)))
        logs.append(-found.min())
    return tuple(row[len(prompt.ids) :]), logs


@pytest.fixture(scope="module")
def plain():
    return trained()


def test_tokens_are_those_of_whole_rows_without_a_cache(plain):
    found = decoded(plain)
    for each, prompt in zip(found[:3], PROMPTS[:3], strict=True):
        wanted, logs = by_loss(plain, prompt)
        assert each.tokens == wanted
        # These also show that nobody sees what a short source is filled with.
        np.testing.assert_allclose(each.log_probs, logs, rtol=1e-4, atol=1e-5)
    # They depend on the source.
    assert len({each.tokens for each in found}) > 1


def chooser_of(beams):
    return BeamSearch(beams) if beams > 1 else Sampler()


@pytest.fixture(scope="module")
def said(plain):
    """Continuations by the plain model, where a row takes the place of a complete one."""
    return functools.cache(lambda beams: decoded(plain, chooser_of(beams), stop=[3]))


SPLIT = "heads:model;d_ff:model;vocab:model"


@pytest.mark.parametrize(
    ("mesh", "layout", "bounds", "beams"),
    [
        # The second stage has the end of the encoder and the beginning of the decoder.
        ("layers:3", "", (0, 1, 4, 6), 1),
        pytest.param("model:2", SPLIT, (0, 6), 1, marks=pytest.mark.exhaustive),
        # Translations are searched in `tests/models/translation`.
        pytest.param("model:2", SPLIT, (0, 6), 3, marks=pytest.mark.exhaustive),
        pytest.param("layers:2;model:2", SPLIT, (0, 2, 6), 3, marks=pytest.mark.exhaustive),
        pytest.param("layers:2", "", (0, 3, 6), 3, marks=pytest.mark.exhaustive),
        pytest.param("layers:4", "", (0, 1, 2, 4, 6), 3, marks=pytest.mark.exhaustive),
        pytest.param("layers:2;model:2", SPLIT, (0, 2, 6), 1, marks=pytest.mark.exhaustive),
        pytest.param("layers:2;data:2", "batch:data", (0, 3, 6), 1, marks=pytest.mark.slow),
    ],
)
def test_every_plan_says_the_same(said, mesh, layout, bounds, beams):
    task = trained(Plan(mesh, layout, num_microbatches=1), bounds)
    found = decoded(task, chooser_of(beams), stop=[3], rows=3)
    assert [each.tokens for each in found] == [each.tokens for each in said(beams)]
    for a, b in zip(found, said(beams), strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2], r"prompt 0 is \[1, 2\]; this model reads SourcePrompts"),
        (SourcePrompt([], [1]), "source 0 has 0 tokens; give 1 to 7"),
        (SourcePrompt([1] * 8, [1]), "source 0 has 8 tokens; give 1 to 7"),
        (SourcePrompt([19], [1]), "source 0 has the token 19"),
        (SourcePrompt([1], []), "prompt 0 is empty"),
    ],
)
def test_a_prompt_that_the_model_cannot_read_is_an_error(plain, prompt, message):
    with pytest.raises(DecodingError, match=message):
        decoded(plain, prompts=[prompt])
