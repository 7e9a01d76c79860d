"""What a layer function may use besides its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.lowering.lowering import Lowering
from pipemesh.mesh.mesh import LAYERS_AXIS

_SAME = ("Identity", "IdentityN")
_WITHOUT_GRADIENT = ("Const", "StopGradient")


@contextlib.contextmanager
def check_layer_function(lowering: Lowering) -> Iterator[None]:
    """Checks what is built inside of the body of a loop.

    The loop has a gradient of its own, which knows the function's arguments alone. A floating
    tensor from outside would silently lose its gradient; constants and tensors from
    `stop_gradient` have none to lose. In eager mode there is nothing to look at.

    Args:
        lowering: of the tensors inside.

    Raises:
        PipelineError: a floating tensor from outside is used, or there is communication along the
            axis of the layers, where everybody works on another microbatch.
    """
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    before = _captures(graph)
    known = {id(inner) for _, inner in before}
    rows = dict(lowering.costs.rows)
    yield
    for outer, inner in _captures(graph):
        if id(inner) not in known and outer.dtype.is_floating and not _is_constant(outer):
            raise PipelineError(
                f"the layer function uses the tensor {outer.name!r} from outside, which would get "
                "no gradient; pass it among the weights, or through tf.stop_gradient if it is a "
                "constant"
            )
    for key, row in lowering.costs.rows.items():
        if LAYERS_AXIS in key[0] and rows.get(key) != row:
            raise PipelineError(
                f"the layer function communicates along axis {LAYERS_AXIS!r} ({key[1]}), where "
                "every stage works on another microbatch; change the rule that splits a dim of its "
                "tensors over this axis"
            )


def _captures(graph: Any) -> list[tuple[Any, Any]]:
    return list(getattr(graph, "captures", []))


def _is_constant(tensor: Any) -> bool:
    if not hasattr(tensor, "op") or not hasattr(tensor, "graph"):
        return False
    while tensor.op.type in _SAME:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.op.type in _WITHOUT_GRADIENT
