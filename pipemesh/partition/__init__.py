"""Costs in, stage boundaries out: contiguous stages with the smallest possible bottleneck.

Pure Python and NumPy: importing this room loads neither TensorFlow nor lingvo (`profile_costs`
loads TensorFlow when it is called). `README.md` in this folder explains the algorithm.

Example:
    >>> from pipemesh.partition import LayerCost, partition
    >>> plan = partition([1, 1, 1, 1], num_stages=2)
    >>> [list(stage) for stage in plan.stages]
    [[0, 1], [2, 3]]
    >>> plan.bottleneck
    2.0
    >>> layers = [LayerCost(forward=1.0, parameter_bytes=1e9, activation_bytes=2e9)] * 6
    >>> plan = partition(layers, 3, memory_limit=16e9, num_microbatches=8)
    >>> plan.boundaries, plan.binding
    ((0, 1, 3, 6), ('memory_limit',))
"""

from pipemesh.partition.costs import LayerCost
from pipemesh.partition.memory import in_flight
from pipemesh.partition.profile import MeasuredCost, profile_costs
from pipemesh.partition.result import Partition
from pipemesh.partition.solve import partition

__all__ = [
    "LayerCost",
    "MeasuredCost",
    "Partition",
    "in_flight",
    "partition",
    "profile_costs",
]
