"""Named devices and dims: the slice of each tensor on each device.

Pure Python: importing this room loads neither TensorFlow nor lingvo.

Example:
    >>> from pipemesh.mesh import LayoutRules, Mesh, Shape
    >>> mesh = Mesh.from_text("layers:4;data:2")
    >>> mesh.num_devices
    8
    >>> rules = LayoutRules.from_text("batch:data")
    >>> layout = rules.tensor_layout(Shape.of(batch=100, io=3), mesh)
    >>> layout.slice_shape, layout.slice_begin(1)
    ((50, 3), (50, 0))
"""

from pipemesh.mesh.find_layout import FoundLayout, Price, Pricing, find_layout
from pipemesh.mesh.layout import LayoutRules, TensorLayout
from pipemesh.mesh.mesh import Mesh
from pipemesh.mesh.shape import Dim, Shape

__all__ = [
    "Dim",
    "FoundLayout",
    "LayoutRules",
    "Mesh",
    "Price",
    "Pricing",
    "Shape",
    "TensorLayout",
    "find_layout",
]
