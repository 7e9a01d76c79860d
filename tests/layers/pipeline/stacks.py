"""Builders of stacks, for the tests of this folder."""

import itertools

from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer


def cells_of(layers, bounds):
    """The layers between the bounds, as stages `s0`, `s1` and so on."""
    return [
        FeatureExtractionLayer.Params().Set(name=f"s{i}", sub=layers[a:b])
        for i, (a, b) in enumerate(itertools.pairwise(bounds))
    ]


def plain(layers, **kwargs):
    return FeatureExtractionLayer.Params().Set(name="plain", sub=layers, **kwargs)


def stack_of(layers, bounds, cls=PipeliningLayer, tied=None, **kwargs):
    """A stack of these stages; `kwargs` are params of a pipelined one."""
    params = cls.Params().Set(
        name="stack", cell_tpl=cells_of(layers, bounds), tied_weights=tied or {}
    )
    return params.Set(**kwargs) if cls is PipeliningLayer else params


def first(outputs):
    return outputs[0]
