"""The program of a core computes what one device would: results, gradients and dropout."""

import numpy as np
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.layers.named import (
    Embedding,
    NamedLayer,
    SoftmaxCrossEntropy,
    TransformerBlock,
    lowering_scope,
)
from pipemesh.lowering import Cores, ops
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.harness import cluster
from tests.layers.named.harness import make_lowering, run, value_of, weights_of

IDS = np.random.default_rng(1).integers(0, 8, [2, 4]).astype(np.int32)
LABELS = np.random.default_rng(2).integers(0, 8, [2, 4]).astype(np.int32)
STEP = 3


class Model(NamedLayer):
    """All layers, from ids to the loss."""

    def __init__(self, params):
        super().__init__(params)
        embedding = Embedding.Params().Set(positions="sinusoidal", dropout_rate=0.2)
        block = TransformerBlock.Params().Set(num_heads=4, hidden_dim=6, dropout_rate=0.2)
        block.attention_tpl.Set(use_rotary=True, num_kv_heads=1)
        softmax = SoftmaxCrossEntropy.Params().Set(vocab_size=8, input_dim=8)
        self.CreateChild("embedding", embedding.Set(vocab_size=8, embedding_dim=8))
        self.CreateChild("block", block.Set(input_dim=8))
        self.CreateChild("softmax", softmax)

    def FProp(self, theta, ids, labels):
        with py_utils.GlobalStepContext(tf.constant(STEP, tf.int64)):
            x = self.embedding.FProp(theta.embedding, ids)
            x = self.block.FProp(theta.block, x)
        return self.softmax.FProp(theta.softmax, x, labels)


PARAMS = Model.Params().Set(name="model")


def test_a_model_as_the_program_of_a_core(eagerly):
    del eagerly
    mesh, rules = Mesh.from_text("data:2;model:2"), "batch:data;heads:model;d_ff:model;vocab:model"
    lowering = make_lowering(str(mesh), rules)
    with cluster(1), lowering_scope(lowering), py_utils.VariableStore():
        layer = PARAMS.Copy().Instantiate()
    weights = weights_of(layer, lowering)
    paths = list(weights)
    held = {
        path: [
            0.3 * value_of(path, layout.shape.sizes)[layout.slice_ranges(core)]
            for core in range(mesh.num_devices)
        ]
        for path, (layout, _) in weights.items()
    }

    def program(core, *slices):
        theta = layer.theta.Transform(lambda _: None)
        for path, value in zip(paths, slices, strict=True):
            theta.Set(path, (value,))
        with cluster(1), lowering_scope(core), tf.GradientTape() as tape:
            tape.watch(slices)
            outputs = layer.FProp(theta, IDS, LABELS)
            loss = ops.reduce_sum(outputs[0])
            for i, output in enumerate(outputs):
                weight = value_of(f"cotangent {i}", output.shape.sizes)
                weight = ops.import_tensor(core, weight, output.shape)
                total = ops.reduce_sum(output * weight)
                loss = loss + total if i else total
        grads = tape.gradient(loss.slices[0], list(slices))
        return [ops.export_tensor(output) for output in outputs], grads

    specs = [tf.TensorSpec(held[path][0].shape) for path in paths]
    cores = Cores(mesh, [f"CPU:{i}" for i in range(4)])
    results = cores.function(program, LayoutRules.from_text(rules), *specs)(
        [[held[path][core] for path in paths] for core in range(4)]
    )
    whole = run(PARAMS, [IDS, LABELS])
    for outputs, _ in results:
        for mine, wanted in zip(outputs, whole.outputs, strict=True):
            np.testing.assert_allclose(mine, wanted, 1e-4, 1e-5)
    for i, path in enumerate(paths):
        layout, _ = weights[path]
        for core, (_, grads) in enumerate(results):
            wanted = whole.grads[path][layout.slice_ranges(core)]
            np.testing.assert_allclose(grads[i], wanted, 1e-3, 1e-4, err_msg=path)
