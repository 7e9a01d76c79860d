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
    """Turns operations on named dims into TensorFlow operations on slices.

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
        # The names of the dims of all tensors so far, and the rules that were warned of.
        self._dims: dict[str, None] = {}
        self._warned: set[str] = set()

    @property
    @abc.abstractmethod
    def num_slices(self) -> int:
        """How many processors this program computes for."""

    @abc.abstractmethod
    def import_tensor(self, tensor: tf.Tensor, layout: TensorLayout) -> Slices:
        """Cuts a whole tensor into slices; the gradient is whole again."""

    @abc.abstractmethod
    def export_tensor(self, slices: Slices, layout: TensorLayout) -> tf.Tensor:
        """Joins slices to the whole tensor, each element from one copy."""

    def computing_slices(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a function of slices is called, which knows nothing of the whole tensors."""
        if self.mesh.num_devices == 1:
            return contextlib.nullcontext()
        return slicewise(
            f"is called inside of Lowering.map on mesh '{self.mesh}', where each processor would "
            "draw for its own slice, so that the numbers would depend on the layout; draw with "
            "ops.dropout, ops.random_uniform or ops.random_normal, which know the layout, and give "
            "map the slices of what they return"
        )

    def tensor_layout(self, shape: Shape) -> TensorLayout:
        """What the rules mean for a tensor.

        Raises:
            LayoutError: the tensor cannot be split so.
        """
        layout = self.rules.tensor_layout(shape, self.mesh)
        self._dims.update(dict.fromkeys(shape.names))
        return layout

    def check_rules(self) -> None:
        """Checks that each rule names a dim that a tensor has had: for the end of a program.

        Raises:
            LayoutError: a rule names a dim that no tensor has had; the message has the nearest one.

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
        """Warns, once for each, of rules that name no dim so far, but almost one without a rule.

        It is called where results leave the program. Rules whose dims just do not occur may be
        meant for other programs; `check_rules` finds them too.
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
