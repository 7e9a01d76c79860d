"""What the partitioner can do, from layers' params."""

import pytest
import tensorflow as tf
from lingvo.core import base_layer, py_utils, tshape

from pipemesh.errors import PartitionError
from pipemesh.layers import PartitionSequentialLayers
from pipemesh.layers import costs as costs_module
from pipemesh.schedule import zb_v

WIDTH, FLOAT = 4, 4
X = tshape.Shape([8, WIDTH])


class Layer(base_layer.BaseLayer):
    """A matrix product that says what it costs; a table of `rows` besides."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("rows", 1, "Rows of the table, which is nothing but large.")
        p.Define("flops", 1.0, "What FPropMeta says.")
        return p

    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        init = py_utils.WeightInit.Constant(1.0)
        self.CreateVariable("table", py_utils.WeightParams([self.params.rows, WIDTH], init))

    def FProp(self, theta, x):
        return tf.square(x) * tf.reduce_sum(theta.table)

    @classmethod
    def FPropMeta(cls, p, x):
        return py_utils.NestedMap(flops=p.flops, out_shapes=(x,))


def stack(number=8, huge=None):
    layers = [Layer.Params().Set(name="layer") for _ in range(number)]
    if huge is not None:
        layers[huge].rows = 1000
    return layers


def cut(params, number, *shapes, **options):
    stages = PartitionSequentialLayers(params, number, *(shapes or (X,)), **options)
    return [len(stage.sub) for stage in stages]


@pytest.fixture
def nothing_traced(monkeypatch):
    def trace(layer, *_):
        raise AssertionError(f"{layer.name} was traced")

    monkeypatch.setattr(costs_module, "_trace", trace)


def test_a_huge_embedding_gets_a_stage_of_its_own_under_a_memory_limit():
    layers = stack(huge=0)
    assert cut(layers, 2) == [4, 4]
    table = 1000 * WIDTH * FLOAT
    # What a layer keeps is much less than the table, but four layers keep too much beside it.
    options = {"num_microbatches": 4, "optimizer_bytes_per_parameter_byte": 0}
    tight = cut(layers, 2, memory_limit=table + 1500, schedule="gpipe", **options)
    assert tight[0] < 4 and sum(tight) == 8
    with pytest.raises(PartitionError, match=r"stage 0 \(layer 0 \('cell_000'\)\) needs"):
        cut(layers, 2, memory_limit=table / 2, **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [4, 4]),
        ({"speeds": [1, 3]}, [2, 6]),
        ({"max_layers": 5, "fixed": [3]}, [3, 5]),
        ({"same_stage": [[1, 5]]}, [6, 2]),
        ({"min_layers": 4}, [4, 4]),
        ({"remat": "except_last"}, [3, 5]),
        ({"schedule": "gpipe", "num_microbatches": 2, "remat": "except_last"}, [4, 4]),
        ({"schedule": "looped_bfs:1"}, [4, 4]),
    ],
)
def test_options_that_ask_for_no_bytes_trace_nothing(options, expected, nothing_traced):
    assert cut(stack(), 2, **options) == expected


def test_tables_place_stages_wherever_they_lie(nothing_traced):
    layers = stack()
    layers[0].flops = 4.0
    for options in (
        {"schedule": zb_v(2, 4)},
        {"schedule": "zb_v", "num_microbatches": 4},
        {"schedule": "zb_v", "num_microbatches": 4, "speeds": [1, 1]},
    ):
        first, second, third, fourth = cut(layers, 4, **options)
        # Device 0 has the first stage and the last one.
        assert {first + 3 + fourth, second + third} == {5, 6}
    assert cut(layers, 4, num_virtual_stages=2, max_layers=3) != []


def test_a_slow_link_is_crossed_where_little_crosses():
    class Narrow(Layer):
        def FProp(self, theta, x):
            return super().FProp(theta, x)[:, :1]

        @classmethod
        def FPropMeta(cls, p, x):
            narrow = tshape.Shape([x[0], 1])
            return py_utils.NestedMap(flops=p.flops, out_shapes=(narrow,))

    layers = stack(6)
    layers[3] = Narrow.Params().Set(name="narrow")
    assert cut(layers, 2) == [3, 3]
    # Four bytes take as long as a flop.
    assert cut(layers, 2, bandwidth=4.0) == [4, 2]


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (2, {"memorylimit": 3}, "'memorylimit' is no option; did you mean 'memory_limit'"),
        (3, {"schedule": zb_v(2, 4)}, "schedule has 4 stages, but num_partitions is 3"),
        (4, {"schedule": zb_v(2, 4), "num_microbatches": 8}, "has 4 microbatches, but num_micro"),
        (4, {"schedule": "zb_v"}, "simulated to count what its stages hold; give num_microb"),
        (2, {"memory_limit": 10}, "memory_limit needs num_microbatches"),
        (2, {"speeds": [1]}, "speeds has 1 numbers for 2 devices"),
    ],
)
def test_options_are_checked(number, options, message, monkeypatch):
    with pytest.raises(PartitionError, match=message):
        cut(stack(), number, **options)


def test_measured_costs_decide_where_flops_mislead():
    layers = stack(4)
    layers[0].flops = 1000.0
    assert cut(layers, 2) == [1, 3]
    assert sum(cut(layers, 2, tf.TensorSpec([8, WIDTH]), measured=True)) == 4
