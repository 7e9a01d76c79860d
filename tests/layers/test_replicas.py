"""Stacks whose batch is split over an axis of the mesh equal the plain stack."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, cluster_factory, py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers import (
    FeatureExtractionLayer,
    FunctionLayer,
    PipeliningLayer,
    SeqLayer,
    mesh_cluster,
)
from pipemesh.layers.mesh_cluster import stage_homes
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.blocks import WIDTH, blocks
from tests.layers.harness import run_tf1, run_tf2
from tests.layers.pipeline.stacks import plain
from tests.layers.pipeline.test_pipelining import cut, pipelined
from tests.pairwise import in_turn

X = np.random.default_rng(0).normal(size=[8, 3, WIDTH]).astype(np.float32)


@functools.cache
def expected(run):
    """The plain model's results, computed once for each mode."""
    return run(plain(blocks(4)), [X], steps=3)


@pytest.mark.parametrize(
    ("run", "mesh", "num_stages", "num_micro_batches", "kwargs"),
    in_turn(
        [run_tf1, run_tf2],
        [
            ("layers:2;data:2", 2, 2, {}),
            ("data:4;layers:2", 2, 1, {"remat": "none"}),
            ("layers:1;data:2", 1, 4, {"loop": True}),
            ("layers:2;data:2", 4, 2, {"schedule": "looped_bfs:2"}),
        ],
    ),
)
def test_everything_equals_the_plain_model_with_dropout_on(
    run, mesh, num_stages, num_micro_batches, kwargs
):
    params = pipelined(cut(blocks(4), num_stages), num_micro_batches, **kwargs)
    found = run(params, [X], steps=3, num_devices=mesh)
    found.assert_close(expected(run), rtol=2e-4, atol=2e-5)
    # What layers count is that of the whole batch.
    np.testing.assert_allclose(found.accumulators, [8.0] * 4)


def test_evaluation_runs_on_replicas_too():
    params = pipelined(cut(blocks(4), 2), 2)
    found = run_tf2(params, [X], num_devices="layers:2;data:2", do_eval=True)
    wanted = run_tf2(plain(blocks(4)), [X], do_eval=True)
    np.testing.assert_allclose(found.outputs[0], wanted.outputs[0], rtol=1e-5)


class Table(base_layer.BaseLayer):
    """Looks rows up, the same ones again and again."""

    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        weights = py_utils.WeightParams([5, WIDTH], py_utils.WeightInit.Gaussian(0.3))
        self.CreateVariable("table", weights)

    def FProp(self, theta, ids):
        return tf.nn.embedding_lookup(theta.table, ids)


@pytest.mark.parametrize("pipelined_or_not", [True, False])
def test_gradients_are_dense_with_and_without_a_pipeline(pipelined_or_not):
    # Of rows that occur twice in a sparse one, lingvo's clipping would take the wrong norm.
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        with mesh_cluster(Mesh.from_text("layers:1")):
            py_utils.GetOrCreateGlobalStepVar().assign(0)
            cells = cut([Table.Params().Set(name="table")], 1)
            layer = pipelined(cells, 2, pipelined=pipelined_or_not).Instantiate()

            @tf.function(autograph=False)
            def gradient(ids):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(layer.FPropDefaultTheta(ids))
                (grad,) = tape.gradient(loss, layer.vars.Flatten())
                assert isinstance(grad, tf.Tensor)
                return grad

            grad = gradient(tf.constant([[1, 1, 1, 3]] * 4))
    finally:
        py_utils.SetEagerMode(False, test_mode=True)
    np.testing.assert_array_equal(grad[:, 0], [0, 12, 0, 4, 0])


def split_cluster(num_devices):
    """A cluster of lingvo's own whose model split has several devices."""
    p = cluster_factory.Current().params.Copy()
    p.mode, p.job = "sync", "trainer_client"
    p.worker.name, p.worker.replicas = "/job:localhost", 1
    p.worker.gpus_per_replica = 0
    p.worker.cpus_per_replica = num_devices
    p.worker.devices_per_split = num_devices
    return cluster_factory.Cluster(p)


def stack(mesh_shape=None, layout=None, **values):
    """Params of a stack without layers."""
    return SeqLayer.Params().Set(name="stack", mesh_shape=mesh_shape, layout=layout, **values)


def test_params_give_a_mesh_to_a_cluster_of_lingvo():
    with split_cluster(6) as cluster:
        homes = stage_homes(cluster, [0, 1, 2], stack("layers:3;data:2", "batch:data"))
        assert [[name[-1] for name in home.devices] for home in homes] == [
            ["0", "1"],
            ["2", "3"],
            ["4", "5"],
        ]
        # Without a mesh each stage has a device.
        assert [len(home) for home in stage_homes(cluster, [0, 1, 2], stack())] == [1, 1, 1]


def test_a_batch_that_does_not_divide_among_replicas_is_an_error():
    params = pipelined(cut(blocks(2), 2), 4)
    with pytest.raises(
        PipelineError, match=r"8 does not divide into 4 microbatches of 4 replicas; .* 1, 2$"
    ):
        run_tf1(params, [X], num_devices="layers:2;data:4")


@pytest.mark.usefixtures("eagerly")
def test_an_error_may_be_explained_when_the_cluster_is_left():
    """It asked for devices of the cluster that was entered by then, and that was another error."""
    dense = FunctionLayer.Params().Set(name="f", function=lambda x: x / tf.reduce_min(x))
    stages = [
        FeatureExtractionLayer.Params().Set(name=f"d{i}", sub=[dense.Copy()]) for i in range(2)
    ]
    params = PipeliningLayer.Params().Set(name="stack", cell_tpl=stages, num_micro_batches=2)
    mesh, layout = Mesh.from_text("layers:2;data:2"), LayoutRules.from_text("batch:data")
    with mesh_cluster(mesh, layout=layout), py_utils.VariableStore():
        stack = params.Instantiate()
        step = tf.function(lambda x: stack.FProp(stack.theta, x))
        with pytest.raises(tf.errors.OpError) as caught:
            step(tf.zeros([8, 3]))
    told = str(stack.Explain(caught.value))
    assert told.startswith("stage 'd1'") and "not finite" in told
