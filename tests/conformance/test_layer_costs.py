"""Flops, bytes and shapes that layers declare are those of their graphs."""

import dataclasses
import itertools

import pytest
import tensorflow as tf

from pipemesh.backend.graphs import called_functions
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer
from pipemesh.layers.foreign_layers import flops_of
from pipemesh.layers.named import NamedLayer, lowering_scope
from tests.conformance.layer_cases import BATCH, CASES, MESH, alone, of_classes, placement
from tests.layers.harness import executing
from tests.layers.named.harness import exported


def flops_of_graph(graph):
    """The flops of all products of matrices in a graph, in loops times their iterations."""
    total = sum(map(flops_of, graph.get_operations()))
    for operation in graph.get_operations():
        functions = list(called_functions(graph, operation))
        times = 1
        if operation.type in ("While", "StatelessWhile"):
            condition, body = functions
            functions = [body]
            # It counts from 0 up to a constant.
            (less,) = [op for op in condition.get_operations() if op.type == "Less"]
            times = int(tf.get_static_value(less.inputs[1]))
        total += times * sum(map(flops_of_graph, functions))
    return total


def traced(case, lowering):
    """The graph of a forward pass, its layer and its outputs."""
    with executing(eager=False), lowering_scope(lowering):
        layer = case.params.Copy().Instantiate()
        inputs = [None if x is None else tf.constant(x) for x in case.inputs]
        outputs = exported(layer.FPropDefaultTheta(*inputs))
        return tf.compat.v1.get_default_graph(), layer, outputs


@pytest.mark.parametrize("name", CASES)
def test_flops_weights_and_shapes(name):
    case = CASES[name]
    meta = case.meta(alone())
    graph, layer, outputs = traced(case, alone())
    assert meta.flops == flops_of_graph(graph)
    weights = layer.vars.Flatten()
    assert meta.parameter_bytes == sum(v.shape.num_elements() * v.dtype.size for v in weights)
    assert sizes_of(meta) == [y.shape.as_list() for y in outputs]
    assert meta.communication_bytes == 0
    # All processors together, as if it were one.
    split = case.meta(placement(case.most_split))
    assert (split.flops, split.parameter_bytes) == (meta.flops, meta.parameter_bytes)
    assert sizes_of(split) == sizes_of(meta)


def sizes_of(meta):
    return [shape.ToTensorShape().as_list() for shape in meta.out_shapes]


class Enter(NamedLayer):
    """Gives its inputs to the next stage in slices, as layers between others get them."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("tokens", (), "Names of the dims of the first input; others have the first few.")
        return p

    def FProp(self, theta, *inputs):
        del theta
        found = []
        for i, x in enumerate(inputs):
            # Those behind the tokens' are a memory's.
            length = "length" if i < 4 else "memory_length"
            dims = [length if dim == "length" else dim for dim in self.params.tokens]
            found.append(None if x is None else self.Named(x, dims[: x.shape.rank]))
        return found[0] if len(found) == 1 else tuple(found)

    def dims(self):
        return set(self.params.tokens)


class Leave(NamedLayer):
    """Returns every copy of every slice, which other layers would go on with."""

    def FProp(self, theta, *outputs):
        del theta
        slices = itertools.chain(*(y.slices for y in outputs))
        # Scalars belong to no example.
        return tuple(tf.broadcast_to(y, [BATCH]) if y.shape.rank == 0 else y for y in slices)


def kept(case, mesh="", rules=""):
    """The bytes of a microbatch that a stage of this layer keeps, on all devices of a replica."""
    enter, leave = (cls.Params().Set(name=cls.__name__) for cls in (Enter, Leave))
    enter.tokens = case.tokens
    cells = [
        FeatureExtractionLayer.Params().Set(name=f"stage{i}", sub=subs)
        for i, subs in enumerate([[enter], [case.params.Copy(), leave]])
    ]
    pipeline = PipeliningLayer.Params().Set(
        name="pipeline", cell_tpl=cells, remat="none", check_numerics="off"
    )
    with executing(eager=False, devices=f"layers:2{mesh} {rules}"):
        devices = pipeline.Instantiate().PredictMemory(*case.specs())
    return sum(device.kept for device in devices[len(devices) // 2 :])


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_for_the_backward_pass(name):
    case = CASES[name]
    assert case.meta(alone()).activation_bytes == kept(case)


def some(*kinds):
    """Of these classes the last case; the rest is `exhaustive`."""
    chosen = [of_classes()[kind][-1].name for kind in kinds]
    return [
        pytest.param(name, marks=() if name in chosen else pytest.mark.exhaustive) for name in CASES
    ]


@pytest.mark.parametrize("name", some("Experts", "TransformerBlock"))
def test_what_is_kept_in_bfloat16(name):
    params = CASES[name].params.Copy().Set(fprop_dtype=tf.bfloat16)
    case = dataclasses.replace(CASES[name], params=params)
    assert case.meta(alone()).activation_bytes == kept(case)


def inner(case):
    """The layout that splits most dims within a replica."""
    return next(r for r in case.by_size(largest_first=True) if "batch" not in dict(r.rules))


@pytest.mark.parametrize(
    "name",
    some("Attention", "FeedForward", "Embedding", "SoftmaxCrossEntropy", "Experts", "Convolution"),
)
def test_what_is_kept_by_all_devices_of_a_replica(name):
    case = CASES[name]
    rules = inner(case)
    assert case.meta(placement(rules)).activation_bytes == kept(case, f";{MESH}", str(rules))
