"""In the stages of a pipeline, named layers compute what they do by themselves."""

import numpy as np
import pytest

from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer
from pipemesh.layers.named import Embedding, SoftmaxCrossEntropy, TransformerBlock
from pipemesh.lowering import ops
from tests.layers.harness import run_tf2

IDS = np.random.default_rng(0).integers(0, 8, [4, 6]).astype(np.int32)
SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 3, [4, 6])).astype(np.int32)


class First(Embedding):
    def FProp(self, theta, ids, segments):
        return ops.export_tensor(super().FProp(theta, ids)), segments


class Middle(TransformerBlock):
    def FProp(self, theta, x, segments):
        return ops.export_tensor(super().FProp(theta, x, segments)), segments


class Last(SoftmaxCrossEntropy):
    def FProp(self, theta, x, segments):
        loss, weight, _ = super().FProp(theta, x, segments)
        return ops.export_tensor(loss), ops.export_tensor(weight)


def pipeline(*sizes, **options):
    block = Middle.Params().Set(
        name="block", input_dim=8, num_heads=2, hidden_dim=12, dropout_rate=0.3
    )
    block.attention_tpl.Set(block_size=4, use_rotary=True)
    layers = iter(
        [
            First.Params().Set(
                name="first", vocab_size=8, embedding_dim=8, positions="learned", max_length=6
            ),
            block,
            Last.Params().Set(name="last", input_dim=8, vocab_size=8),
        ]
    )
    stages = [
        FeatureExtractionLayer.Params().Set(name=f"stage{i}", sub=[next(layers) for _ in range(n)])
        for i, n in enumerate(sizes)
    ]
    params = PipeliningLayer.Params().Set(name="pipe", cell_tpl=stages, loss_inside=True, **options)
    return run_tf2(params, [IDS, SEGMENTS], num_devices=len(sizes), loss=lambda outputs: outputs[0])


@pytest.mark.slow
def test_loss_and_gradients_do_not_depend_on_stages_and_microbatches():
    whole = pipeline(3, num_micro_batches=1)
    # Gradients of inputs and of weights at different times.
    cut = pipeline(2, 1, num_micro_batches=2, schedule="zb_h1", remat="none")
    whole.assert_close(cut, rtol=1e-3, atol=1e-4)
