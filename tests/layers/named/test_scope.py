"""Which lowering is the current one."""

import threading

import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError
from pipemesh.layers.named import current_lowering, lowering_scope
from pipemesh.lowering import ops
from tests.layers.named.harness import make_lowering


def test_scopes_nest_around_one_processor_and_end_with_an_error_too():
    outer, inner = make_lowering("model:2"), make_lowering("model:4")
    with lowering_scope(outer):
        with pytest.raises(KeyError), lowering_scope(inner):
            assert current_lowering() is inner
            raise KeyError
        assert current_lowering() is outer
    alone = current_lowering()
    assert alone.num_slices == 1 and alone is current_lowering()


def test_outside_of_a_scope_the_device_is_that_of_the_scope_around():
    @tf.function(autograph=False)
    def run(x):
        with tf.device("CPU:3"):
            chosen = ops.exp(ops.import_tensor(current_lowering(), x, "batch:2")).slices[0]
        left = ops.exp(ops.import_tensor(current_lowering(), x, "batch:2")).slices[0]
        return chosen, left

    graph = run.get_concrete_function(tf.TensorSpec([2])).graph
    devices = [op.device for op in graph.get_operations() if op.type == "Exp"]
    assert devices == ["/device:CPU:3", ""]


def test_a_thread_begins_outside_of_all_scopes():
    found = []
    with lowering_scope(make_lowering("model:2")):
        thread = threading.Thread(target=lambda: found.append(current_lowering().num_slices))
        thread.start()
        thread.join()
    assert found == [1]


def test_what_is_no_lowering_is_an_error():
    with pytest.raises(LayoutError, match="'model:2' is no lowering"), lowering_scope("model:2"):
        raise AssertionError
