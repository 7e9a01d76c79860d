"""Runs a stack of alike stages as one loop on all cores, with named dims or any operations.

Example:
    >>> import tensorflow as tf
    >>> from pipemesh.lowering import PlacementLowering, ops
    >>> from pipemesh.mesh import LayoutRules, Mesh
    >>> from pipemesh.recurrent.circular import SimdPipeline
    >>> mesh, rules = Mesh.from_text("layers:2"), LayoutRules.from_text("layers:layers")
    >>> pipeline = SimdPipeline(mesh, num_layers=2, num_microbatches=2)
    >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
    >>> x = ops.import_tensor(lowering, tf.ones([4, 1]), "batch:4;io:1")
    >>> w = tf.reshape(tf.constant([2.0, 3.0]), [1, 2, 1, 1])
    >>> w = ops.import_tensor(lowering, w, pipeline.stacked("io:1"))
    >>> y = pipeline(lambda x, weights, position: x * weights["w"], x, {"w": w})
    >>> ops.export_tensor(y).numpy().tolist()
    [[6.0], [6.0], [6.0], [6.0]]
"""

from pipemesh.recurrent.circular.alike_pipeline import alike_pipeline
from pipemesh.recurrent.circular.layer_position import LayerPosition, layer_seed
from pipemesh.recurrent.circular.simd_pipeline import SimdPipeline

__all__ = [
    "LayerPosition",
    "SimdPipeline",
    "alike_pipeline",
    "layer_seed",
]
