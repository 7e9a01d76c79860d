"""Lowers operations on tensors with named dims to TensorFlow, on placed or SIMD devices.

Example:
    >>> import tensorflow as tf
    >>> from pipemesh.lowering import PlacementLowering, ops
    >>> from pipemesh.mesh import LayoutRules, Mesh
    >>> mesh, rules = Mesh.from_text("model:2"), LayoutRules.from_text("hidden:model")
    >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
    >>> x = ops.import_tensor(lowering, tf.ones([3, 4]), "batch:3;hidden:4")
    >>> total = ops.reduce_sum(x * 2.0, "hidden")
    >>> total
    Tensor('batch:3', float32)
    >>> ops.export_tensor(total).numpy().tolist()
    [8.0, 8.0, 8.0]
    >>> print(lowering.costs)
    axes   primitive   pass     calls  bytes
    model  all_reduce  forward      1     12
    total                           1     12
    <BLANKLINE>
    split over  operation   pass     calls  flops  bytes of memory
    model       multiply    forward      1      6               48
    model       reduce_sum  forward      1      6               36
    total                                2     12               84
    flops that all devices along an axis compute alike: model 0.0%
"""

# First: it says what is missing.
from pipemesh import needs_tensorflow as needs_tensorflow  # isort: skip

from pipemesh.lowering import ops as ops
from pipemesh.lowering.costs import OperationCosts
from pipemesh.lowering.lowering import Lowering
from pipemesh.lowering.placement import PlacementLowering
from pipemesh.lowering.pricing import program_pricing
from pipemesh.lowering.simd.cores import Cores
from pipemesh.lowering.simd.simd_lowering import SimdLowering
from pipemesh.lowering.tensor import Tensor

__all__ = [
    "Cores",
    "Lowering",
    "OperationCosts",
    "PlacementLowering",
    "SimdLowering",
    "Tensor",
    "ops",
    "program_pricing",
]
