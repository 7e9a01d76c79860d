"""Which layers of a stack are alike, and what cannot be cut so."""

import pytest
from lingvo.core import layers

from pipemesh.errors import PipelineError, PipemeshError
from pipemesh.layers import FeatureExtractionLayer
from pipemesh.layers.pipeline.simd_cut import SimdCut, simd_cut
from tests.layers.pipeline.test_simd_stack import layers_of, stack


def test_the_longest_run_of_alike_layers_is_found():
    assert simd_cut(stack([0, 3, 6])) == SimdCut(1, 1)
    bare = layers_of()[1:-1]
    assert simd_cut(stack([0, 2, 4], layers=bare)) == SimdCut(0, 0)
    # Two of one kind before four of another.
    other = [layer.Copy().Set(name=f"other{i}") for i, layer in enumerate(bare[:2])]
    for layer in other:
        layer.random_seed = 7
    assert simd_cut(stack([0, 4, 6], layers=[*other, *bare])) == SimdCut(2, 0)


def test_params_are_split_at_the_run():
    params = stack([0, 3, 6])
    before, stages, behind = simd_cut(params).split(params.cell_tpl)
    assert [[layer.name for layer in cell.sub] for cell in (before, *stages, behind)] == [
        ["named_embedding"],
        ["named_block0", "named_block1"],
        ["named_block2", "named_block3"],
        ["named_head"],
    ]
    assert [cell.name for cell in (before, behind)] == ["s0_before", "s1_behind"]
    assert [len(cell.sub) for cell in params.cell_tpl] == [3, 3]


def nested():
    params = stack([0, 3, 6])
    inner = params.cell_tpl[1].sub[0]
    params.cell_tpl[1].sub[0] = FeatureExtractionLayer.Params().Set(name="inner", sub=[inner])
    return params


def fetching():
    params = stack([0, 3, 6])
    params.cell_tpl[0].Set(act_fetch_layers=["named_block0"], num_act_outputs=1)
    return params


FC = [layers.FCLayer.Params().Set(name=f"fc{i}", input_dim=4, output_dim=4) for i in range(4)]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (stack([0, 2, 6]), "so that stages have 3, 3 layers, but in cell_tpl they have 2, 4"),
        (stack([0, 2, 4, 6]), "3 stages as many alike layers, but there are 4 .Masked."),
        (nested(), "'s1' is a FeatureExtractionLayer or has stages inside"),
        (fetching(), "'s0' fetches or hands on activations"),
        (stack([0, 2, 4], layers=FC), "the alike layers are FCLayers"),
        (stack([0, 3, 6], tied={"named_block1.norm": "named_block0.norm"}), "which .* stacks"),
        (stack([0, 3, 6], schedule="1f1b"), "lowering is 'simd'.* use schedule='gpipe'"),
        (stack([0, 3, 6], remat="none"), "remat is 'none'"),
        (stack([0, 3, 6], loop=False), "loop is False"),
        (stack([0, 3, 6], fprop_dtype=layers.tf.float16), "the loss is not scaled"),
        (stack([0, 3, 6], state_dtype=layers.tf.bfloat16), "activations keep their dtype"),
        (stack([0, 3, 6], strict_devices=True), "strict_devices is True"),
        (stack([0, 3, 6], check_numerics="all"), "check_numerics is 'all'"),
        (stack([0, 3, 6], check_numerics="results"), "the loss alone is looked at"),
    ],
)
def test_what_cannot_be_honoured_is_an_error_and_not_dropped(params, words):
    with pytest.raises(PipemeshError, match=words) as found:
        params.Instantiate()
    assert isinstance(found.value, PipelineError) or "schedule" in words
