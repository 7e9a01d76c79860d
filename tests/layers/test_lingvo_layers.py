"""Layers of lingvo inside of a pipeline: recurrent ones, random ones, those of a translator."""

import numpy as np
import pytest
from lingvo.core import (
    base_layer,
    batch_major_attention,
    layers,
    py_utils,
    rnn_cell,
    rnn_layers,
    spectrum_augmenter,
)

from tests.layers.harness import run_tf1
from tests.layers.stacks import stack_of

TIME, BATCH, WIDTH = 3, 4, 5
RNG = np.random.default_rng(0)
X = RNG.normal(size=[TIME, BATCH, WIDTH]).astype(np.float32)
PADDINGS = (RNG.uniform(size=[TIME, BATCH, 1]) < 0.2).astype(np.float32)


class Recurrent(base_layer.BaseLayer):
    """An LSTM over time with noisy weights, dropout between layers, and paddings that pass."""

    def __init__(self, params):
        super().__init__(params)
        cell = rnn_cell.LSTMCellSimple.Params().Set(
            name="cell", num_input_nodes=WIDTH, num_output_nodes=WIDTH
        )
        cell.vn = py_utils.VariationalNoiseParams(
            scale=0.1, global_vn=True, deterministic=True, seed=3
        )
        self.CreateChild("rnn", rnn_layers.FRNN.Params().Set(name="rnn", cell=cell))
        dropout = layers.DeterministicDropoutLayer.Params().Set(name="dropout", keep_prob=0.7)
        self.CreateChild("dropout", dropout)

    def FProp(self, theta, x, paddings):
        y, _ = self.rnn.FProp(theta.rnn, x, paddings)
        # What lingvo gives for time steps that are padding depends on the longest example.
        y *= 1 - paddings
        return self.dropout.FProp(theta.dropout, y) + x, paddings


def stack(layer, **kwargs):
    return stack_of([layer.Copy().Set(name=f"layer{i}") for i in range(2)], [0, 1, 2], **kwargs)


@pytest.mark.slow
def test_a_recurrent_layer_of_lingvo_equals_the_plain_model():
    wanted = run_tf1(stack(Recurrent.Params(), pipelined=False), [X, PADDINGS])
    params = stack(Recurrent.Params(), num_micro_batches=2, batch_dim=1)
    run_tf1(params, [X, PADDINGS], num_devices=2).assert_close(wanted, rtol=1e-4, atol=1e-5)


class Augmented(base_layer.BaseLayer):
    """Masks times and frequencies at random, before a dense layer."""

    def __init__(self, params):
        super().__init__(params)
        masks = spectrum_augmenter.SpectrumAugmenter.Params().Set(
            freq_mask_max_bins=3, time_mask_max_frames=2, use_noise=True, gaussian_noise=True
        )
        self.CreateChild("masks", masks)
        self.CreateChild("dense", layers.FCLayer.Params().Set(input_dim=8, output_dim=8))

    def FProp(self, theta, x, paddings):
        x, paddings = self.masks.FProp(theta.masks, x, paddings)
        return self.dense.FProp(theta.dense, x[..., 0])[..., None], paddings


@pytest.mark.slow
def test_a_spectrum_augmenter_equals_the_plain_model(run):
    x = RNG.normal(size=[4, 6, 8, 1]).astype(np.float32)
    paddings = np.zeros([4, 6], np.float32)
    layer = Augmented.Params()
    wanted = run(stack(layer, pipelined=False), [x, paddings], num_devices=2)
    found = run(stack(layer, num_micro_batches=2), [x, paddings], num_devices=2)
    found.assert_close(wanted)


def translator_layers():
    """A layer of lingvo's encoder and one of its decoder, with packed sentences and dropout."""
    cls = batch_major_attention.GPipeBatchMajorTransformerLayer
    block = cls.SetupDeterministicDropout(cls.Params().Set(input_dim=8, packed_input=True))
    block.tr_atten_tpl.Set(num_heads=2, residual_dropout_prob=0.2, atten_dropout_prob=0.1)
    block.tr_fflayer_tpl.Set(hidden_dim=16, residual_dropout_prob=0.2, relu_dropout_prob=0.1)
    decoder = block.Copy().Set(has_aux_atten=True, mask_self_atten=True)
    return [block.Set(name="layer0"), decoder.Set(name="layer1")]


@pytest.mark.slow
def test_lingvos_translator_equals_the_plain_model():
    """lingvo's layers for GPipe pass all seven values on, so they are stages as they are."""
    segments = [np.array([[1, 1, 2, 2, 0], [1] * 5] * 2), np.array([[1, 2, 2], [1, 1, 0]] * 2)]
    source, target = (RNG.normal(size=[4, n, 8]).astype(np.float32) for n in (5, 3))
    paddings = [(each == 0).astype(np.float32) for each in segments]

    def mask(rows, columns):
        return (rows[:, None, :, None] != columns[:, None, None, :]).astype(np.float32)

    inputs = [source, paddings[0], target, paddings[1]]
    inputs += [mask(a, b) for a, b in ((segments[0],) * 2, (segments[1],) * 2, segments[::-1])]
    wanted = run_tf1(stack_of(translator_layers(), [0, 1, 2], pipelined=False), inputs)
    params = stack_of(translator_layers(), [0, 1, 2], num_micro_batches=2, remat="none")
    found = run_tf1(params, inputs, num_devices=2)
    # The bias of keys has no gradient but round-off.
    found.assert_close(wanted, rtol=1e-4, atol=5e-5)
    assert {name.split("/")[0] for name in found.grads} == {"layer0", "layer1"}
