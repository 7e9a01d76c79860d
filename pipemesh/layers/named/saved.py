"""Names of variables that do not depend on the layout, for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.saved_state import Slice, SlicedVariable, slice_of


def by_logical_name(layer: Any, variables: Sequence[Any]) -> dict[str, Any]:
    """Returns variables by logical name, for a `tf.train.Checkpoint` valid under every layout.

    Args:
        layer: a lingvo layer; layers with named dims among its children may have cut weights.
        variables: variables of the layer, or of its optimizer. The names of the latter begin with
            the names of the layer's.

    Returns:
        Variables that are not cut, by logical name without `:0`. For each cut weight, and the
        optimizer's state of it, all slices as one.

    Example:
        >>> import tensorflow as tf
        >>> from lingvo.core import py_utils
        >>> from pipemesh.layers.named import FeedForward, by_logical_name, lowering_scope
        >>> from pipemesh.lowering import PlacementLowering
        >>> from pipemesh.mesh import LayoutRules, Mesh
        >>> mesh, rules = Mesh.from_text("model:2"), LayoutRules.from_text("d_ff:model")
        >>> params = FeedForward.Params().Set(name="ff", input_dim=4, hidden_dim=8, use_bias=False)
        >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
        >>> with lowering_scope(lowering), py_utils.VariableStore():
        ...     layer = params.Instantiate()
        >>> len(layer.vars.Flatten()), list(by_logical_name(layer, layer.vars.Flatten()))
        (4, ['ff/w_in/var', 'ff/w_out/var'])
    """
    slices = {v.name: slice_of(v) for v in layer.vars.Flatten()}
    found: dict[str, Any] = {}
    parts: dict[str, list[tuple[tf.Variable, Slice]]] = {}
    for variable in variables:
        name = variable.name.removesuffix(":0")
        marked = slice_of(variable)
        if marked is None:
            # The optimizer's name follows the name of the weight.
            of, _, state = name.rpartition("/")
            marked = slices.get(f"{of}:0")
            if marked is None or variable.shape.rank != len(marked[1].whole):
                found[name] = variable
                continue
            marked = f"{marked[0]}/{state}", marked[1]
        parts.setdefault(marked[0], []).append((variable, marked[1]))
    return found | {name: SlicedVariable(own) for name, own in parts.items()}
