"""The stages in the names of lingvo's checkpoints."""

import pytest
from lingvo.core import gpipe, tshape

from pipemesh import layers as ours
from pipemesh.errors import PipelineError
from pipemesh.layers.lingvo_stages import boundaries_in, with_stages, without_stages
from tests.layers import lingvo_checkpoint_process as model

SHAPE = tshape.Shape([model.BATCH, model.WIDTH])
NAMES = ["lm/cell_002/w/var", "lm/cell_003/ff/w/var/Adam_1", "lm/softmax/w/var", "global_step"]


def test_names_get_the_stage_of_their_layer():
    expected = [
        "lm/d0/cell_002/w/var",
        "lm/d1/cell_003/ff/w/var/Adam_1",
        "lm/softmax/w/var",
        "global_step",
    ]
    names = with_stages(NAMES, (0, 3, 4))
    assert list(names.values()) == expected
    assert list(without_stages(expected).values()) == NAMES
    # Those of another partition, and a stage without layers, as lingvo may make one.
    assert list(with_stages(expected, [0, 1, 1, 4]).values())[:2] == [
        "lm/d2/cell_002/w/var",
        "lm/d2/cell_003/ff/w/var/Adam_1",
    ]


@pytest.mark.parametrize("boundaries", [[0, 3, 4], [0, 1], [0, 0, 2, 2, 5], [0, 1, 2, 3]])
def test_boundaries_are_read_from_names_as_they_were_put_in(boundaries):
    """Whether a stage is empty or not, but for a last one, which no name tells of."""
    names = [f"lm/cell_{layer:03d}/w/var" for layer in range(boundaries[-1])]
    assert boundaries_in(reversed(with_stages(names, boundaries).values())) == boundaries


def test_stages_are_params_of_lingvo_or_of_this_library_or_boundaries():
    """The params of what was cut automatically say no more than its boundaries do."""
    layers = [model.dense() for _ in range(5)]
    cut = gpipe.PartitionSequentialLayers(layers, 2, SHAPE)
    boundaries = (0, len(cut[0].sub), 5)
    names = [f"lm/{stage}cell_00{i}/w/var" for i in range(5) for stage in ("", "d9/")]
    for name in names:
        assert with_stages([name], cut) == with_stages([name], boundaries)
    for lib in (gpipe, ours):
        stages = model.by_hand(lib.FeatureExtractionLayer.Params)
        assert with_stages(["lm/first/w/var", "lm/last/block/w/var"], stages) == {
            "lm/first/w/var": "lm/stage0/first/w/var",
            "lm/last/block/w/var": "lm/stage1/last/block/w/var",
        }
        assert list(without_stages(["lm/stage0/first/w/var"], stages).values()) == [
            "lm/first/w/var"
        ]


@pytest.mark.parametrize(
    ("names", "stages", "told"),
    [
        (NAMES, (0, 3), "'lm/cell_003/ff/w/var/Adam_1' is of layer 3, but the stages have 3 layer"),
        (NAMES, (1, 4), r"stages=\[1, 4\] are no boundaries; they begin with 0 and rise"),
        (NAMES, (0, 4, 3), "are no boundaries"),
        (NAMES, (), "are no boundaries"),
        (NAMES, 2, r"stages=\[2\] are no boundaries"),
        (["lm/w/var"], (0, 3), "no variable lies in a layer .such as cell_000.*'lm/w/var'.*params"),
        (["cell_000/w", "d0/cell_000/w"], (0, 1), "would both be 'd0/cell_000/w'"),
    ],
)
def test_stages_that_do_not_fit_are_an_error(names, stages, told):
    with pytest.raises(PipelineError, match=told):
        with_stages(names, stages)


def test_stages_whose_layers_are_called_alike_need_no_other_names():
    """Two stages of a layer `block` each: their names are lingvo's, and no error."""
    stages = [
        ours.FeatureExtractionLayer.Params().Set(name=name, sub=[model.dense("block")])
        for name in ("encoder", "decoder")
    ]
    names = ["encoder/block/w/var", "decoder/block/w/var"]
    assert list(without_stages(names, stages)) == names
    assert list(with_stages(names, stages).values()) == names
