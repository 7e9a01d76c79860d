"""Builders of stacks, and their comparison with the layers in sequence."""

import itertools

import numpy as np
import tensorflow as tf

from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer, SeqLayer
from tests.layers.harness import run_tf1, run_tf2, squared_sum


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


# Round-off of operations in another order, without training.
EXACT = {"rtol": 2e-5, "atol": 2e-6}


def first(outputs):
    return outputs[0]


_plain_results = {}


def plain_params(params):
    """The layers of a stack without stages."""
    layers = [*params.before_tpl, *(layer for cell in params.cell_tpl for layer in cell.sub)]
    if params.tied_weights or getattr(params, "loss_inside", False):
        # It ties weights, and returns a loss of a layer with named dims as a plain tensor.
        return stack_of(layers, [0, len(layers)], SeqLayer, params.tied_weights)
    return plain(layers)


def plain_results(run, params, inputs, *, steps=0, do_eval=False, loss=squared_sum):
    """The results of the layers of a stack without stages, computed once for each mode."""
    run = run_tf1 if run is run_tf1 else run_tf2
    model = plain_params(params)
    values = [np.asarray(value).tobytes() for value in tf.nest.flatten(inputs)]
    key = run, model.ToText(), *values, steps, do_eval, loss
    if key not in _plain_results:
        options = {"steps": steps, "do_eval": do_eval, "loss": loss}
        _plain_results[key] = run(model, inputs, **options)
    return _plain_results[key]


def equal_to_plain(run, params, inputs, mesh=1, *, rtol=1e-4, atol=1e-5, **options):
    """The results of a stack, which equal those of its layers in sequence."""
    found = run(params, inputs, num_devices=mesh, **options)
    found.assert_close(plain_results(run, params, inputs, **options), rtol=rtol, atol=atol)
    return found
