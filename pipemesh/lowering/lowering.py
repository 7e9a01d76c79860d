"""The interface of all lowerings: local computation on slices, and communication."""

from __future__ import annotations

import abc
import contextlib
import warnings

import tensorflow as tf

from pipemesh.lowering.costs import CommunicationCosts
from pipemesh.lowering.given import check_rules
from pipemesh.lowering.primitives import Primitives, Slices
from pipemesh.mesh import LayoutRules, Mesh, Shape, TensorLayout
from pipemesh.mesh.mesh import check_mesh
from pipemesh.randomness.scope import slicewise
from pipemesh.text import almost_equal


class Lowering(Primitives):
    """The base of objects that turn operations on named dims into TensorFlow operations.

    Attributes:
        mesh: the mesh.
        rules: the layout rules.
        costs: counts the communication while the program is built.
    """

    def __init__(self, mesh: Mesh, rules: LayoutRules) -> None:
        """Checks the rules.

        Args:
            mesh: the mesh.
            rules: the layout rules.

        Raises:
            LayoutError: a rule names an unknown axis.
        """
        check_mesh(mesh)
        check_rules(rules)
        rules.check(mesh)
        self.mesh = mesh
        self.rules = rules
        self.costs = CommunicationCosts(mesh)
        # The dim names of all tensors so far, and the rules that already caused a warning.
        self._dims: dict[str, None] = {}
        self._warned: set[str] = set()

    @property
    @abc.abstractmethod
    def num_slices(self) -> int:
        """Returns the number of processors that this program computes for."""

    @abc.abstractmethod
    def import_tensor(self, tensor: tf.Tensor, layout: TensorLayout) -> Slices:
        """Cuts a whole tensor into slices; the gradient is whole again."""

    @abc.abstractmethod
    def export_tensor(self, slices: Slices, layout: TensorLayout) -> tf.Tensor:
        """Joins slices to the whole tensor, each element from one copy."""

    def computing_slices(self) -> contextlib.AbstractContextManager[None]:
        """Marks a call of a function of slices, which has no access to whole tensors."""
        if self.mesh.num_devices == 1:
            return contextlib.nullcontext()
        return slicewise(
            f"is called inside of Lowering.map on mesh '{self.mesh}', where each processor would "
            "draw for its own slice, so that the numbers would depend on the layout; draw with "
            "ops.dropout, ops.random_uniform or ops.random_normal, which know the layout, and give "
            "map the slices of what they return"
        )

    def tensor_layout(self, shape: Shape) -> TensorLayout:
        """Returns the layout of a tensor under the rules.

        Raises:
            LayoutError: the rules cannot split the tensor.
        """
        layout = self.rules.tensor_layout(shape, self.mesh)
        self._dims.update(dict.fromkeys(shape.names))
        return layout

    def check_rules(self) -> None:
        """Checks at the end of a program that some tensor had each dim that a rule names.

        Raises:
            LayoutError: a rule names a dim that no tensor had; the message suggests a name.

        Example:
            >>> from pipemesh.lowering import PlacementLowering, ops
            >>> mesh, rules = Mesh.from_text("data:1"), LayoutRules.from_text("bacth:data")
            >>> lowering = PlacementLowering(mesh, rules, ["CPU:0"])
            >>> x = ops.import_tensor(lowering, [1.0, 2.0], "batch:2")
            >>> lowering.check_rules()
            Traceback (most recent call last):
            pipemesh.errors.LayoutError: rule 'bacth:data' names dim 'bacth', which no tensor has; \
did you mean 'batch'? Known: 'batch'
        """
        self.rules.check(self.mesh, self._dims)

    def warn_of_misspelt_rules(self) -> None:
        """Warns once of each rule that names no known dim but resembles a dim without a rule.

        Operations that return results call it. Other rules without a matching dim may be meant for
        other programs; only `check_rules` reports them.
        """
        free = [name for name in self._dims if self.rules.axis(name) is None]
        for dim, axis in self.rules.rules:
            near = almost_equal(dim, free) or next((n for n in free if n in dim.split("_")), None)
            if dim in self._dims or dim in self._warned or near is None:
                continue
            self._warned.add(dim)
            warnings.warn(
                f"rule '{dim}:{axis}' names dim {dim!r}, which no tensor of the program has had; "
                f"dim {near!r}, which has no rule, is not split. Did you mean '{near}:{axis}'?",
                stacklevel=3,
            )
